from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

import commfuse_fx as cf
from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.ir.mesh import Mesh
from commfuse_fx.sharding.dividing.resolve import resolve_marks
from commfuse_fx.sharding.marking.layout_op import LAYOUT, erase_marks, is_mark, mark_of, strip_marks
from commfuse_fx.sharding.marking.marks import collect
from commfuse_fx.sharding.marking.paths import matches, near_matches
from tests.sharding.tracing import activation_layouts, mark_nodes, parameter_layouts, resolved, traced

EIGHT = Mesh((8,), ("dp",))
TWO_FOUR = Mesh((2, 4), ("dp", "tp"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, hidden, scale=1.0):
        return hidden + self.down(torch.relu(self.up(input=hidden))) * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 24)

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return self.head(x)


class Run(nn.Module):
    """A function as a module, with parameters."""

    def __init__(self, function, **parameters):
        super().__init__()
        self.function = function
        for name, shape in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x):
        return self.function(x, *self.parameters())


def x8():
    return torch.randn(8, 8)


# Eager.


def test_marked_things_behave_as_unmarked():
    net = Net()
    x = x8()
    before = net(x)
    assert cf.shard(net, "h.*.up", in_strategy=((8, 1),), out_strategy=((8, 1),), weight=(1, 1)) is net
    assert cf.shard(net.head, in_strategy=(8, 1), weight=(8, 1)) is net.head
    assert cf.shard(net.head.bias, (8,)) is net.head.bias
    assert torch.equal(net(x), before)
    assert not net.head._forward_hooks and not net.head._forward_pre_hooks
    assert list(net.state_dict()) == list(Net().state_dict())
    assert cf.shard(torch.matmul, in_strategy=((2, 1), (1, 4)))(x, x).equal(x @ x)
    assert cf.shard(F.linear, ((2, 1), None), out_strategy=(2, 1))(x, weight=x).equal(F.linear(x, x))
    assert cf.shard(x, ("dp", None)) is x
    assert cf.shard(x[:3], (8, 1)).shape == (3, 8)  # only a compiled step has to divide


def test_marks_are_copied_with_the_model():
    net = cf.shard(Net(), "h.*.up", weight=(8, 1))
    assert [marked.path for marked in collect(copy.deepcopy(net)).modules] == ["h.0.up", "h.1.up"]
    assert not collect(Net())


def test_the_same_line_marks_once():
    net = Net()
    for _ in range(3):
        cf.shard(net.head, weight=(8, 1))
        cf.shard(net.head.bias, (8,))
    marks = collect(net)
    assert len(marks.modules) == len(marks.parameters) == 1


# Targets and patterns.


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("h.*.mlp", "h.0.mlp", True),
        ("h.*.mlp", "h.0.x.mlp", False),
        ("h.*", "h", False),
        ("**.mlp", "mlp", True),
        ("**.mlp", "h.0.mlp", True),
        ("h.**", "h.0.mlp.c_fc", True),
        ("h.**.w", "h.w", True),
        ("c_*", "c_fc", True),
        ("h.[01].mlp", "h.1.mlp", True),
        ("mlp", "h.mlp", False),
        ("H.*", "h.0", False),
    ],
)
def test_patterns(pattern, path, expected):
    assert matches(pattern, path) is expected


def test_patterns_name_modules_or_parameters():
    net = Net()
    cf.shard(net, "h.*.up", weight=("dp", None), bias=("dp",))
    cf.shard(net, "h.*.down.weight", (None, "dp"))
    cf.shard(net, "head.weight", in_strategy=("dp", None))
    assert parameter_layouts(resolved(net, EIGHT, x8())) == {
        "h.0.up.weight": "S(0) on dp",
        "h.0.up.bias": "S(0) on dp",
        "h.1.up.weight": "S(0) on dp",
        "h.1.up.bias": "S(0) on dp",
        "h.0.down.weight": "S(1) on dp",
        "h.1.down.weight": "S(1) on dp",
        "head.weight": "S(0) on dp",
    }


def test_near_matches_show_one_name_for_all_blocks():
    names = [f"transformer.h.{i}.mlp.c_fc" for i in range(12)] + ["lm_head"]
    assert near_matches("h.*.mlp.c_fc", names) == ["transformer.h.0.mlp.c_fc"]


def here(message):
    return rf"test_marks\.py:\d+: {re.escape(message)}"


@pytest.mark.parametrize(
    ("mark", "error", "message"),
    [
        (lambda net: cf.shard(net, "h.*.upp", weight=(8, 1)), ConfigValueError,
         "pattern 'h.*.upp' matches no module and no parameter of Net; near are h.0.up"),
        (lambda net: cf.shard(net, "zzz", (8, 1)), ConfigValueError,
         "pattern 'zzz' matches no module and no parameter of Net; paths start with h, head"),
        (lambda net: cf.shard(net, "h.*.down", bias=(8,)), ConfigValueError,
         "module h.0.down has no parameter 'bias', which is marked (8,); it has weight"),
        (lambda net: cf.shard(net.head, weight=(8, 1, 1)), ConfigValueError,
         "the strategy of parameter weight is (8, 1, 1), which has 3 entries, but the tensor has 2 dimensions (shape "
         "(24, 8)); give one entry per dimension"),
        (lambda net: cf.shard(net.head.weight, (16, 1)), ConfigValueError,
         "the strategy of a parameter is (16, 1): dimension 0 of shape (24, 8) has size 24, which does not divide into "
         "16 slices"),
        (lambda net: cf.shard(net.head, weight=(True, 1)), ConfigTypeError,
         "weight is (True, 1), in which entry 0 is True; give the number of slices as an int"),
        (lambda net: cf.shard(net.head), ConfigTypeError,
         "Linear is given no strategy; give in_strategy=, out_strategy= or both"),
        (lambda net: cf.shard(net.head, ((8, 1),), in_strategy=((8, 1),)), ConfigTypeError,
         "in_strategy of Linear is given twice, by position and by name; give it once"),
        (lambda net: cf.shard(torch.mul, (8, 1), (8, 1), (8, 1)), ConfigTypeError,
         "torch.mul is given 3 strategies by position; give in_strategy and out_strategy"),
        (lambda net: cf.shard(torch.mul), ConfigTypeError, "torch.mul is given no strategy"),
        (lambda net: cf.shard(torch.mul, weight=(8, 1)), ConfigTypeError, "weight is (8, 1), but target is"),
        (lambda net: cf.shard(torch.mul, ((0, 1), (1, 1))), ConfigValueError,
         "in_strategy of torch.mul[0] is (0, 1), in which entry 0 is 0; give a count >= 1"),
        (lambda net: cf.shard("h.*.up", weight=(8, 1)), ConfigTypeError, "weight is (8, 1), but target is 'h.*.up'"),
        (lambda net: cf.shard("h.*.up", (8, 1)), ConfigTypeError,
         "target is 'h.*.up', which is no module, parameter, function or tensor; give the model first: cf.shard(model"),
        (lambda net: cf.shard(3, (8, 1)), ConfigTypeError, "target is 3, which is no module"),
        (lambda net: cf.shard(net.head.weight), ConfigTypeError, "a tensor takes one strategy, not 0; write"),
        (lambda net: cf.shard(x8(), (8, 1), out_strategy=(8, 1)), ConfigTypeError,
         "a tensor takes one strategy, not 2"),
        (lambda net: cf.shard(net, "head.weight", (8, 1), weight=(8, 1)), ConfigTypeError,
         "weight is given for parameter head.weight; a pattern that names parameters takes one strategy"),
        (lambda net: cf.shard(net.head, axis="tp", weight=(8, 1)), ConfigTypeError,
         "axis is 'tp', but no plan is given for it"),
        (lambda net: cf.shard(net, {"head": cf.plans.Layouts(parameters={"weight": (8, 1)})}, weight=(8, 1)),
         ConfigTypeError, "a plan is given together with strategies"),
    ],
)  # fmt: skip
def test_bad_marks_are_refused_where_they_are_made(mark, error, message):
    net = Net()
    with pytest.raises(error, match=here(message)):
        mark(net)
    assert not collect(net)


# Marks in a traced step.


def test_without_marked_nothing_is_recorded():
    from commfuse_fx.capture.trace import trace_step

    net = cf.shard(Net(), "h.*", in_strategy=((8, 1),))
    found = trace_step(net, lambda module, inputs, _: module(*inputs).sum(), [x8()], EIGHT, True)
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


# Errors that need the step.


def failing(net, mesh=EIGHT):
    with pytest.raises(ConfigValueError) as caught:
        resolved(net, mesh, x8())
    return str(caught.value)


def test_two_ops_that_divide_one_weight_in_two_ways():
    mul1 = cf.shard(torch.mul, ((8, 1), (8, 1)))
    mul2 = cf.shard(torch.mul, ((1, 8), (1, 8)))
    net = Run(lambda x, w: mul2(mul1(x, w), w), w=(8, 8))
    assert re.fullmatch(
        r"two marks give parameter w two layouts: in_strategy\[1\] of torch\.mul, \(8, 1\) at \S*test_marks\.py:(\d+) "
        r"means S\(0\) on dp, but in_strategy\[1\] of torch\.mul, \(1, 8\) at \S*test_marks\.py:(\d+) means S\(1\) on "
        r"dp; give both the same layout, or remove one",
        failing(net),
    )
    places = [int(found) for found in re.findall(r"test_marks\.py:(\d+)", failing(net))]
    assert places[1] == places[0] + 1


def test_a_parameter_and_an_op_that_disagree_or_agree():
    net = Run(cf.shard(torch.mul, ((8, 1), (8, 1))), w=(8, 8))
    cf.shard(net.w, ("dp", None))
    found = resolved(net, EIGHT, x8())
    assert parameter_layouts(found) == {"w": "S(0) on dp"}
    cf.shard(net.w, (1, 8))
    message = failing(net)
    assert "in_strategy[1] of torch.mul, (8, 1)" in message and "the strategy of parameter w, (1, 8)" in message


def test_tied_parameters_are_one():
    net = Net()
    net.h[1].up.weight = net.h[0].up.weight
    cf.shard(net, "h.1.up", weight=(8, 1))
    assert parameter_layouts(resolved(net, EIGHT, x8())) == {"h.0.up.weight": "S(0) on dp"}
    cf.shard(net, "h.0.up.weight", (1, 8))
    message = failing(net)
    assert "two marks give parameter h.0.up.weight two layouts" in message
    assert "weight of h.1.up, (8, 1)" in message and "weight of h.0.up, (1, 8)" in message


def test_a_module_that_is_called_twice_needs_one_layout():
    net = Net()
    net.h[1] = net.h[0]
    cf.shard(net.h[0].up, in_strategy=((2, 1),), weight=(4, 1))
    found = resolved(net, TWO_FOUR, x8())
    assert parameter_layouts(found) == {"h.0.up.weight": "R on dp, S(0) on tp"}
    assert [mark_of(node).number for node in found.activations if not mark_of(node).gradient] == [0, 1]


def test_marks_on_different_axes_are_joined():
    net = cf.shard(Net(), {"head.weight": {"tp": "S(0)"}})
    cf.shard(net.head, weight={"dp": "S(1)"})
    found = resolved(net, TWO_FOUR, x8())
    assert parameter_layouts(found) == {"head.weight": "S(1) on dp, S(0) on tp"}
    assert found.data_axes == ()


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        (lambda net: cf.shard(net, in_strategy=((3, 1),)), "in_strategy[0] of the model is (3, 1): dimension 0 of "
         "shape (8, 8) has size 8, which does not divide into 3 slices"),
        (lambda net: cf.shard(net.head, in_strategy=((2, 1, 1),)), "in_strategy[0] of head is (2, 1, 1), which has 3 "
         "entries, but the tensor has 2 dimensions (shape (8, 8))"),
        (lambda net: cf.shard(net.head, weight=(3, 1)), "weight of head is (3, 1): 3 slices in all, which does not "
         "divide the world of 8 ranks (mesh dp=8)"),
        (lambda net: cf.shard(net.head, out_strategy=("tp", None)), "out_strategy[0] of head is ('tp', None), which "
         "names no mesh axis: 'tp'; axes are dp"),
        (lambda net: cf.shard(net.h[0], in_strategy=((8, 1), (8, 1))), "in_strategy of module h.0 marks its input 1, "
         "but forward is called with 1 positional inputs and no named ones"),
        (lambda net: cf.shard(net.head, out_strategy=((8, 1), (8, 1))), "out_strategy of head has 2 entries, but it "
         "returns 1 tensors; give at most one per tensor"),
        (lambda net: setattr(net.head, "forward", lambda x: cf.shard(torch.mul, ((8, 1),))(x, x)),
         "in_strategy of torch.mul has 1 entries, but it is called with 2 tensors; give one per tensor"),
        (lambda net: setattr(net.head, "forward", lambda x: cf.shard(x, (8,))), "the strategy of a tensor is (8,), "
         "which has 1 entries, but the tensor has 2 dimensions"),
    ],
)  # fmt: skip
def test_errors_of_a_step_name_the_mark(mark, message):
    net = Net()
    mark(net)
    assert re.match(rf"\S*{here(message)}", failing(net))


def test_an_input_that_is_no_tensor():
    net = Net()
    net.h[0].register_forward_pre_hook(lambda module, args: (*args, 2.0))
    cf.shard(net.h[0], in_strategy=(None, (8,)))
    assert "input 1 of module h.0 is marked (8,), but is 2.0; give None for what is no tensor" in failing(net)


# Axes of the batch.


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


def test_help_teaches_by_example():
    text = cf.shard.__doc__
    for example in ("in_strategy=((2, 1), (1, 4))", '("dp", None)', "cf.plans.tensor_parallel", "ColwiseParallel()"):
        assert example in text


class _Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def _without_weight(layer: nn.Linear) -> None:
    del layer.weight


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: parametrize.register_parametrization(layer, "weight", _Twice()),
        _without_weight,
    ],
    ids=["pruned", "parametrized", "deleted"],
)
def test_a_marked_parameter_that_is_gone_is_named(change: Callable[[nn.Linear], object]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    cf.shard(model[0], weight=("tp", None))
    assert isinstance(model[0], nn.Linear)
    change(model[0])
    step = cf.compile(model, loss_fn=nn.functional.mse_loss, parallel_mode="semi_auto", mesh=(1, 2), device_num=2)
    with pytest.raises(cf.CommFuseError, match="module 0 has no parameter 'weight', which is marked .*; it has "):
        step.lower(torch.randn(4, 4), torch.randn(4, 2))
