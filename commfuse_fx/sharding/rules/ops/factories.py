"""Ops that make tensors of a constant value."""

from __future__ import annotations

from collections.abc import Sequence

from commfuse_fx.ir.core.placement import P, R, S
from commfuse_fx.sharding.rules.writing.call import OpCall, Strategy
from commfuse_fx.sharding.rules.writing.common import along, aten, divided, shape_of, with_argument
from commfuse_fx.sharding.rules.writing.rule_registry import rule


@rule(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default)
def _like(call: OpCall) -> Sequence[Strategy]:
    """The result is divided as the input is. The values of the input do not matter."""
    found = [Strategy((R,), (P,))]
    for dim in range(len(shape_of(call))):
        found += along(call, (dim,), (dim,))
    return found


@rule(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default)
def _new(call: OpCall) -> Sequence[Strategy]:
    """Only dtype and device of the input matter."""
    whole = shape_of(call)
    found = _values_ignored(call)
    for dim in range(len(whole)):
        step = with_argument(call, "size", divided(whole, dim, call.ways))
        found += along(call, (None,), (dim,), (step,))
        if whole == call.inputs[0].shape:
            found += along(call, (dim,), (dim,), (step,))
    return found


@rule(aten.new_empty_strided.default)
def _new_strided(call: OpCall) -> Sequence[Strategy]:
    return _values_ignored(call)


def _values_ignored(call: OpCall) -> list[Strategy]:
    dims = range(len(call.inputs[0].shape))
    return [Strategy((R,), (P,)), *(Strategy((R,), (S(dim, n),)) for dim in dims for n in call.blocks)]
