"""The input of one division of a graph: a group of mesh axes, and the placements that are fixed on it.

Why: docs/decisions.md, "One mesh axis after the other".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from commfuse_fx.ir.core.placement import Placement, Shard, divides, divides_in_turn, local_shape
from commfuse_fx.sharding.dividing.decisions import State

PROPAGATED = "propagated"
"""The `where` of a placement that no mark has asked for."""


SEARCHED = "searched"
"""That of a placement that a search has found."""


@dataclass(frozen=True)
class Pin:
    """A placement that is fixed. `where`: the mark that asks for it, for messages."""

    placement: Placement
    where: str


@dataclass(frozen=True)
class Axis:
    """One group of mesh axes over which a graph is divided, with the fixed placements on it.

    group: the axes ("tp", or "dp,tp" if both are marked alike).
    ways: the number of ranks in the group.
    parameters: fixed placements by parameter name. A parameter pinned to R is whole on every rank.
    inputs: placements by input name. Other inputs are whole on every rank.
    activations: fixed placements by the name of the mark's node.
    local_inputs: whether ranks are given their parts of the inputs instead of the whole.
    local_parameters: whether ranks keep only their parts of divided parameters.
    is_data: whether only the batch is divided over this group. Parameters without a pin are then whole.
    states: the strategies that are fixed, by the name of the op's node. Other ops take the cheapest one.
    blocks: the numbers of blocks that fixed strategies may have; (): as those of their inputs.
    """

    group: str
    ways: int
    parameters: Mapping[str, Pin] = field(default_factory=dict)
    inputs: Mapping[str, Placement] = field(default_factory=dict)
    activations: Mapping[str, Pin] = field(default_factory=dict)
    local_inputs: bool = False
    local_parameters: bool = False
    is_data: bool = False
    states: Mapping[str, State] = field(default_factory=dict)
    blocks: tuple[int, ...] = ()


def mark_has_room(name: str, shape: tuple[int, ...], placement: Placement, axis: Axis, later: Sequence[Axis]) -> bool:
    """Whether parts over an axis can be divided further, as a mark of this name says for later axes."""
    return _has_room(shape, placement, axis, [(each.activations.get(name), each.ways) for each in later])


def parameter_has_room(name: str, shape: tuple[int, ...], axis: Axis, later: Sequence[Axis]) -> bool:
    """Whether an axis can divide a parameter along each dimension that axes which divide later have to divide."""
    pins = [(each.parameters.get(name), each.ways) for each in later]
    taken = [pin.placement for pin, _ in pins if pin is not None and isinstance(pin.placement, Shard)]
    return all(_has_room(shape, Shard(each.dim), axis, pins) for each in taken)


def _has_room(
    shape: tuple[int, ...], placement: Placement, axis: Axis, later: Sequence[tuple[Pin | None, int]]
) -> bool:
    """later: pins, each with the number of ranks. What does not divide over the axis at all leaves all its room."""
    if not divides(shape, placement, axis.ways):
        return True
    pins = ((pin.placement, ways) for pin, ways in later if pin is not None)
    return divides_in_turn(local_shape(shape, placement, axis.ways), pins)
