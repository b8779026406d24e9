"""Ops at the border of a call that computes with a rank's own part of the batch, over other axes than the batch's.

Over an axis of the batch they are what `commfuse_fx/sharding/dividing/own_parts.py` says.
"""

from __future__ import annotations

from collections.abc import Sequence

from commfuse_fx.ir.core.placement import P, Placement, S
from commfuse_fx.sharding.marking.part_ops import MEAN_OF_PARTS, OWN_ROWS, OWN_WHOLE, ROWS_OF_PARTS, SUM_OF_PARTS
from commfuse_fx.sharding.rules.writing.call import OpCall, Strategy
from commfuse_fx.sharding.rules.writing.rule_registry import rule


def _along(call: OpCall, first: int) -> Sequence[Strategy]:
    """Divide any dimension from this one on, or take partial sums."""
    dims = range(first, len(call.inputs[0].shape))
    placements: list[Placement] = [S(dim, blocks) for dim in dims for blocks in call.blocks]
    return [Strategy((placement,), (placement,)) for placement in (*placements, P)]


@rule(OWN_ROWS, ROWS_OF_PARTS)
def _rows(call: OpCall) -> Sequence[Strategy]:
    return _along(call, 1)


@rule(OWN_WHOLE, MEAN_OF_PARTS, SUM_OF_PARTS)
def _whole(call: OpCall) -> Sequence[Strategy]:
    return _along(call, 0)
