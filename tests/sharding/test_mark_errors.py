"""Marks that contradict each other, or the step in which they are used."""

from __future__ import annotations

import re

import pytest
import torch

import commfuse_fx as cf
from commfuse_fx.config.options import SEARCH_MODES
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.sharding.marking.layout_op import mark_of
from tests.sharding.marked_models import EIGHT, TWO_FOUR, Net, Run, here, x8
from tests.sharding.tracing import parameter_layouts, resolved


def failing(net, mesh=EIGHT):
    with pytest.raises(ConfigValueError) as caught:
        resolved(net, mesh, x8())
    return str(caught.value)


def test_two_ops_that_divide_one_weight_in_two_ways():
    mul1 = cf.shard(torch.mul, ((8, 1), (8, 1)))
    mul2 = cf.shard(torch.mul, ((1, 8), (1, 8)))
    net = Run(lambda x, w: mul2(mul1(x, w), w), w=(8, 8))
    assert re.fullmatch(
        r"two marks give parameter w two layouts: in_strategy\[1\] of torch\.mul, \(8, 1\) at \S*mark_errors\.py:(\d+) "
        r"means S\(0\) on dp, but in_strategy\[1\] of torch\.mul, \(1, 8\) at \S*mark_errors\.py:(\d+) means S\(1\) on "
        r"dp; give both the same layout, or remove one",
        failing(net),
    )
    places = [int(found) for found in re.findall(r"test_mark_errors\.py:(\d+)", failing(net))]
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


def two_marks(first, second, **options):
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    cf.shard(net, "0", **first)
    cf.shard(net, "*", **second)
    steps = {"parallel_mode": "semi_auto", "mesh": (2, 4), "device_num": 8, **options}
    return cf.compile(net, loss_fn=torch.nn.functional.mse_loss, **steps).lower(torch.zeros(8, 8), torch.zeros(8, 8))


@pytest.mark.parametrize("mode", [*SEARCH_MODES, "semi_auto"])
@pytest.mark.parametrize("which", ["out_strategy", "in_strategy"])
def test_two_marks_of_one_module_that_disagree(which, mode):
    options = {} if mode == "semi_auto" else {"parallel_mode": "auto", "search_mode": mode, "cluster": "h100-node"}
    with pytest.raises(
        ConfigValueError,
        match=rf"two marks give {which}\[0\] of 0 two layouts: \('dp', None\) at \S*mark_errors.py:\d+ means S\(0\) on "
        r"dp, R on tp, but \(None, 'tp'\) at \S*mark_errors.py:\d+ means R on dp, S\(1\) on tp; give both the same",
    ):
        two_marks({which: (("dp", None),)}, {which: ((None, "tp"),)}, **options)


def test_two_marks_of_one_module_that_agree():
    lowered = two_marks({"out_strategy": ({"dp": "S(0)"},)}, {"out_strategy": ({"tp": "S(1)"},)})
    assert "all_gather" in lowered.text()


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
    assert re.match(rf"\S*{here('test_mark_errors', message)}", failing(net))


def test_an_input_that_is_no_tensor():
    net = Net()
    net.h[0].register_forward_pre_hook(lambda module, args: (*args, 2.0))
    cf.shard(net.h[0], in_strategy=(None, (8,)))
    assert "input 1 of module h.0 is marked (8,), but is 2.0; give None for what is no tensor" in failing(net)
