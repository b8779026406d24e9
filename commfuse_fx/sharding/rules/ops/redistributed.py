"""Redistributions over one mesh axis, divided along another."""

from __future__ import annotations

from collections.abc import Sequence

from commfuse_fx.ir.core.placement import P, Placement, S
from commfuse_fx.ir.ops.redistribution import exchange_parts, gather_parts, own_part, sum_and_divide, sum_partial
from commfuse_fx.sharding.rules.writing.call import OpCall, Strategy
from commfuse_fx.sharding.rules.writing.rule_registry import rule


def _along(call: OpCall, *taken: int) -> Sequence[Strategy]:
    """Divide any dimension that is not redistributed, or take partial sums, since redistributions are linear."""
    dims = [dim for dim in range(len(call.inputs[0].shape)) if dim not in taken]
    placements: list[Placement] = [S(dim, blocks) for dim in dims for blocks in call.blocks]
    return [Strategy((placement,), (placement,)) for placement in (*placements, P)]


@rule(sum_partial)
def _sum_partial(call: OpCall) -> Sequence[Strategy]:
    found = _along(call)
    return found if call.args[2] == "sum" else found[:-1]


@rule(own_part)
def _own_part(call: OpCall) -> Sequence[Strategy]:
    return _along(call, call.args[3])


@rule(sum_and_divide, gather_parts)
def _one_dim(call: OpCall) -> Sequence[Strategy]:
    return _along(call, call.args[3])


@rule(exchange_parts)
def _two_dims(call: OpCall) -> Sequence[Strategy]:
    return _along(call, call.args[3], call.args[4])
