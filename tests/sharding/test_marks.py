"""What may be marked, by which names, and bad marks that are refused at once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

import commfuse_fx as cf
from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.sharding.marking.marks import collect
from commfuse_fx.sharding.marking.paths import matches, near_matches
from tests.sharding.marked_models import EIGHT, Net, here, x8
from tests.sharding.tracing import parameter_layouts, resolved

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
    with pytest.raises(error, match=here("test_marks", message)):
        mark(net)
    assert not collect(net)


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
