"""Rules of users for their own ops."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.sharding import OpCall, P, R, S, Strategy
from commfuse_fx.sharding.rules.writing import rule_registry
from commfuse_fx.virtual.virtual_world import LockstepWorld

_library = torch.library.Library("commfuse_test_rules", "DEF")
_library.define("scale_rows(Tensor x, Tensor s) -> Tensor")
_library.define("several(Tensor x) -> Tensor")
_library.define("several.other(Tensor x, int n) -> Tensor")


@torch.library.impl(_library, "scale_rows", "CompositeExplicitAutograd")
def _scale(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return x * s[:, None]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> Any:
    x, s = ctx.saved_tensors
    return torch.ops.commfuse_test_rules.scale_rows(grad, s), (grad * x).sum(1)


torch.library.register_autograd("commfuse_test_rules::scale_rows", _backward, setup_context=_keep, lib=_library)

OP = torch.ops.commfuse_test_rules.scale_rows
EXAMPLE = (torch.randn(8, 4), torch.randn(8))


def right(call: OpCall) -> Sequence[Strategy]:
    return [Strategy((S(0),), (S(0), S(0))), Strategy((S(1),), (S(1), R)), Strategy((P,), (P, R))]


@pytest.fixture(autouse=True)
def no_rule_left() -> Iterator[None]:
    yield
    rule_registry.remove_rule(OP.default)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return OP(self.linear(x), s).square().sum()


def lower() -> tuple[cf.CompiledStep, cf.Lowered, tuple[torch.Tensor, ...], nn.Module]:
    model = Scaled().double()
    step = cf.compile(model, parallel_mode="semi_auto", device_num=4, full_batch=True, form="step")
    arguments = (torch.randn(8, 4).double(), torch.randn(8).double())
    return step, step.lower(*arguments), arguments, copy.deepcopy(model)


def test_an_op_without_a_rule_is_replicated_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    _, lowered, _, _ = lower()
    (message,) = [r.getMessage() for r in caplog.records if "scale_rows" in r.getMessage() and "backward" not in r.msg]
    assert "no sharding rule" in message and "every rank computes the whole" in message
    assert __file__ in message and "cf.register_rule" in message
    assert any(each.kind == "all_gather" for each in lowered.collectives)
    assert "no sharding rule" in lowered.explain().text()


def test_a_registered_rule_divides_the_op(caplog: pytest.LogCaptureFixture) -> None:
    cf.register_rule(OP, right, examples=[EXAMPLE])
    step, lowered, arguments, reference = lower()
    assert not [r for r in caplog.records if "scale_rows" in r.getMessage()]
    assert {each.kind for each in lowered.collectives} == {"all_reduce"}
    reference(*arguments).backward()
    for result in LockstepWorld(step)([arguments] * 4):
        for name, param in reference.named_parameters():
            torch.testing.assert_close(result.grads[name], param.grad)


def test_as_a_decorator() -> None:
    @cf.register_rule(OP.default, examples=[EXAMPLE])
    def rule(call: OpCall) -> Sequence[Strategy]:
        return right(call)

    assert rule_registry.find_rule(OP.default) is not None


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda call: [Strategy((P,), (P, P))], r"example 0 shows for 2 ranks.*P, P -> P.*off by"),
        (lambda call: [Strategy((S(0),), (S(0), R))], r"S\(0\), R -> S\(0\).*raises"),
        (lambda call: [Strategy((S(1),), (S(1),))], r"1 input and 1 output placements.*2 tensor inputs"),
        (lambda call: [], r"proves nothing"),
    ],
    ids=["sums", "sizes", "arity", "empty"],
)
def test_a_wrong_rule_is_refused(rule: Any, message: str) -> None:
    with pytest.raises(cf.ConfigValueError, match=message):
        cf.register_rule(OP, rule, examples=[EXAMPLE])
    assert rule_registry.find_rule(OP.default) is None


def test_a_wrong_rule_leaves_the_old_one() -> None:
    cf.register_rule(OP, right)
    before = rule_registry.find_rule(OP.default)
    with pytest.raises(cf.ConfigValueError):
        cf.register_rule(OP, lambda call: [Strategy((P,), (P, P))], examples=[EXAMPLE])
    assert rule_registry.find_rule(OP.default) is before


@pytest.mark.parametrize(
    ("op", "rule", "message"),
    [
        (torch.relu, right, "op is .*relu.*; give an op such as"),
        (torch.ops.commfuse_test_rules.several, right, "overloads default, other; give one of them"),
        (OP, 7, "rule of .* is 7; give a function"),
        (OP, lambda call: ["S(0)"], "gives 'S\\(0\\)'; give commfuse_fx.sharding.Strategy"),
    ],
    ids=["function", "overloads", "rule", "strategy"],
)
def test_bad_arguments(op: Any, rule: Any, message: str) -> None:
    with pytest.raises(cf.ConfigTypeError, match=message):
        cf.register_rule(op, rule, examples=[EXAMPLE])
