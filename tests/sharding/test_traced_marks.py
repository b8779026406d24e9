"""Marks in a traced step: the layouts that they give, and the axes of the batch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import commfuse_fx as cf
from commfuse_fx.capture.trace.trace import trace_step
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.sharding.dividing.resolve import resolve_marks
from commfuse_fx.sharding.marking.layout_op import LAYOUT, erase_marks, is_mark, mark_of, strip_marks
from commfuse_fx.sharding.marking.marks import collect
from tests.sharding.marked_models import EIGHT, TWO_FOUR, Net, Run, x8
from tests.sharding.tracing import activation_layouts, mark_nodes, parameter_layouts, resolved, traced


def test_without_marked_nothing_is_recorded():
    net = cf.shard(Net(), "h.*", in_strategy=((8, 1),))
    found = trace_step(net, lambda module, inputs, _: [module(*inputs).sum()], [x8()], EIGHT, True)
    assert all(node.target is not LAYOUT for node in found.graph.nodes)


def test_a_module_is_marked_with_its_inputs_parameters_and_results():
    net = Net()
    cf.shard(net, "h.*.up", in_strategy=((2, 1),), out_strategy=((2, 4),), weight=(4, 1), bias=(4,))
    found = resolved(net, EIGHT, x8())
    assert str(found.mesh) == "dp.0=2xdp.1=4"
    assert parameter_layouts(found) == {
        "h.0.up.weight": "R on dp.0, S(0) on dp.1",
        "h.0.up.bias": "R on dp.0, S(0) on dp.1",
        "h.1.up.weight": "R on dp.0, S(0) on dp.1",
        "h.1.up.bias": "R on dp.0, S(0) on dp.1",
    }
    expected = {
        "h.0.up in0": "S(0) on dp.0, R on dp.1",
        "h.0.up out0": "S(0) on dp.0, S(1) on dp.1",
        "h.1.up in0": "S(0) on dp.0, R on dp.1",
        "h.1.up out0": "S(0) on dp.0, S(1) on dp.1",
    }
    assert activation_layouts(found) == expected
    # x does not require a gradient.
    assert activation_layouts(found, gradient=True) == {k: v for k, v in expected.items() if k != "h.0.up in0"}
    assert found.data_axes == ("dp.0",)


def test_hooks_are_gone_after_a_trace_and_marks_can_be_stripped():
    net = cf.shard(Net(), "h.*", in_strategy=((8, 1), None), out_strategy=((8, 1),))
    program = traced(net, EIGHT, x8())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert len(mark_nodes(program)) == 4 + 3
    unmarked = traced(Net(), EIGHT, x8())
    strip_marks(program.graph)
    assert [node.target for node in program.graph.nodes] == [node.target for node in unmarked.graph.nodes]


def test_a_program_whose_loss_is_marked_keeps_its_loss():
    net = Run(lambda x, w: cf.shard(cf.shard((x * w).sum(), ()), (None,) * 0), w=(8, 8))
    program = traced(net, EIGHT, x8())
    program.loss = mark_nodes(program)[1]
    program.grads = {"w": program.loss}
    erase_marks(program)
    assert program.loss.target is torch.ops.aten.sum.default and program.grads == {"w": program.loss}
    assert not mark_nodes(program) and not is_mark(program.loss)
    program.set_output()
    program.graph.lint()


def test_functions_and_tensors_in_forward():
    product = cf.shard(torch.matmul, in_strategy=((2, 1), (1, 4)), out_strategy=((2, 4),))
    net = Run(lambda x, w: cf.shard(product(x, w * 2).relu(), [Shard(0), Replicate()]), w=(8, 8))
    found = resolved(net, TWO_FOUR, x8())
    assert activation_layouts(found) == {
        "torch.matmul in0": "S(0) on dp, R on tp",
        "torch.matmul in1": "R on dp, S(1) on tp",
        "torch.matmul out0": "S(0) on dp, S(1) on tp",
        "a tensor in0": "S(0) on dp, R on tp",
    }
    assert not found.parameters
    assert found.data_axes == ("dp",)


class Doubled:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_the_names_of_marked_functions_have_no_addresses():
    softmax = cf.shard(partial(torch.softmax, dim=-1), ((2, 1),))
    doubled = cf.shard(Doubled(), ((2, 1),))
    found = resolved(Run(lambda x, w: doubled(softmax(x @ w)), w=(8, 8)), TWO_FOUR, x8())
    assert list(activation_layouts(found)) == ["torch.softmax in0", "Doubled in0"]


@pytest.mark.parametrize(
    ("take", "shape", "expected"),
    [
        (lambda w: w, (8, 8), "R on dp, S(1) on tp"),
        (lambda w: w.t(), (8, 8), "R on dp, S(0) on tp"),
        (lambda w: w.transpose(-1, 0), (8, 8), "R on dp, S(0) on tp"),
        (lambda w: w.permute(1, 0), (8, 8), "R on dp, S(0) on tp"),
        (lambda w: w.double().float(), (8, 8), "R on dp, S(1) on tp"),
        (lambda w: w.clone().t().contiguous(), (8, 8), "R on dp, S(0) on tp"),
        (lambda w: w.unsqueeze(0).squeeze(0), (8, 8), "R on dp, S(1) on tp"),
        (lambda w: w[None, None].view(8, 8), (8, 8), "R on dp, S(1) on tp"),
        (lambda w: w.view(8, 8), (64,), None),
        (lambda w: w + 0, (8, 8), None),
    ],
)
def test_a_marked_parameter_is_pinned_through_views_and_casts(take, shape, expected):
    product = cf.shard(torch.matmul, in_strategy=((2, 1), (1, 4)))
    net = Run(lambda x, w: product(x, take(w)), w=shape)
    found = resolved(net, TWO_FOUR, x8())
    assert parameter_layouts(found) == ({} if expected is None else {"w": expected})
    assert [mark_of(node).gradient for node in found.parameter_nodes] == ([] if expected is None else [False, True])
    assert ("torch.matmul in1" in activation_layouts(found)) is (expected is None)


def test_a_parameter_marked_inside_forward():
    net = Run(lambda x, w: x @ cf.shard(w, ("tp", None)), w=(8, 8))
    assert parameter_layouts(resolved(net, TWO_FOUR, x8())) == {"w": "R on dp, S(0) on tp"}


def test_lists_of_tensors_and_several_results():
    joined = cf.shard(torch.cat, in_strategy=((8, 1), None), out_strategy=((8, 1),))
    split = cf.shard(torch.chunk, (8, 1), (None, (1, 8)))
    net = Run(lambda x, w: split(joined([x, x * w], dim=1), 2, dim=1)[1], w=(8, 8))
    assert activation_layouts(resolved(net, EIGHT, x8())) == {
        "torch.cat in0": "S(0) on dp",
        "torch.cat out0": "S(0) on dp",
        "torch.chunk in0": "S(0) on dp",
        "torch.chunk out1": "S(1) on dp",
    }


def test_a_step_without_gradients_and_two_traces_alike():
    net = cf.shard(Net(), "h.*.up", in_strategy=((8, 1),), out_strategy=((8, 1),))
    program = traced(net, EIGHT, x8(), training=False)
    assert [mark_of(node).gradient for node in mark_nodes(program)] == [False] * 4
    again = traced(net, EIGHT, x8(), training=False)
    assert [node.args[1:] for node in mark_nodes(program)] == [node.args[1:] for node in mark_nodes(again)]


def test_marks_under_autocast_and_on_integers():
    class Embed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(16, 8)
            self.head = nn.Linear(8, 8)

        def forward(self, ids):
            with torch.autocast("cpu", torch.bfloat16):
                return self.head(self.embed(cf.shard(ids, (8, 1))))

    net = Embed()
    cf.shard(net, "head", out_strategy=((8, 1, 1),))
    found = resolved(net, EIGHT, torch.zeros(8, 4, dtype=torch.int64))
    assert activation_layouts(found) == {"a tensor in0": "S(0) on dp", "head out0": "S(0) on dp"}
    assert activation_layouts(found, gradient=True) == {"head out0": "S(0) on dp"}


def test_an_axis_of_one_rank_divides_nothing():
    net = Run(lambda x, w: x * cf.shard(w.unsqueeze(0), ("dp", None, "tp"))[0], w=(8, 8))
    found = resolved(net, Mesh((1, 4), ("dp", "tp")), x8())
    assert parameter_layouts(found) == {"w": "R on dp, S(1) on tp"}


def test_checkpointed_modules_are_marked_again():
    net = Net()
    cf.shard(net.h[0].up, in_strategy=((8, 1),), out_strategy=((8, 1),))

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False)

    program = traced(Checkpointed(), EIGHT, x8())
    numbers = {mark_of(node).number for node in mark_nodes(program)}
    assert numbers == {0, 1}
    assert set(map(str, resolve_marks(collect(Checkpointed()), program).activations.values())) == {"S(0) on dp"}


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        (lambda net: None, ("dp", "tp")),
        (lambda net: cf.shard(net.head, in_strategy=(("dp", None),)), ("dp", "tp")),
        (lambda net: cf.shard(net.head, in_strategy=((None, "tp"),)), ("dp",)),
        (lambda net: cf.shard(net.head, weight=("tp", None)), ("dp",)),
        (lambda net: cf.shard(net.head, weight=(("dp", "tp"), None)), ()),
        (lambda net: cf.shard(net.head, weight=(None, None)), ("dp", "tp")),
    ],
)
def test_data_axes(mark, expected):
    net = Net()
    mark(net)
    assert resolved(net, TWO_FOUR, x8()).data_axes == expected
