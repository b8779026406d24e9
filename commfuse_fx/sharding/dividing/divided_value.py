"""A value of the graph that is being divided: the placements in which it exists, and the costs of others.

Why: docs/decisions.md, "`semi_auto` decides op by op, in order".
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from commfuse_fx.ir.core.meta import Spec, TensorSpec
from commfuse_fx.ir.core.placement import Partial, Placement, R, Replicate, Shard, divides

Cost = tuple[int, int]
"""(bytes on the wire, bytes that are cut out of a whole tensor), compared in this order."""

FREE: Cost = (0, 0)


@dataclass
class Value:
    """One value of the graph that is being divided.

    whole: its spec before the division.
    versions: the nodes of the new graph that hold it, by placement.
    pending: the node that computes it, while its placement is undecided (a parameter without a mark, or a view of one).
        Then every placement that it can have is free.
    made_by: the node that computes it of constants and random seeds alone. Then no placement of it is ever sent: a part
        is computed as a part.
    weight: the factor on the bytes of gathering it. It is more than 1 for parameters that the user wants divided.
    """

    whole: Spec
    versions: dict[Placement, fx.Node] = field(default_factory=dict)
    pending: fx.Node | None = None
    made_by: fx.Node | None = None
    weight: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether the whole value on every rank is its only version, or none has been asked for yet."""
        if self.pending is not None:
            return False
        return not self.versions if self.made_by is not None else list(self.versions) == [R]

    def nearest(self, wanted: Placement, ways: int) -> tuple[Cost, Placement] | None:
        """The version from which `wanted` is made most cheaply, with the cost; None if that is impossible."""
        best: tuple[Cost, Placement] | None = None
        for have in self.versions:
            cost = self.transition(have, wanted, ways)
            if cost is not None and (best is None or cost < best[0]):
                best = (cost, have)
        return best

    def transition(self, have: Placement, wanted: Placement, ways: int) -> Cost | None:
        """The cost of a redistribution from one placement to another; None if it is impossible."""
        if have == wanted:
            return FREE
        if not isinstance(self.whole, TensorSpec):
            return None
        size = self.whole.nbytes
        if isinstance(wanted, Partial):  # all of it on the first rank, nothing on the others
            return (0, size) if isinstance(have, Replicate) else None
        if isinstance(have, Replicate):
            return (0, size) if divides(self.whole.shape, wanted, ways) else None
        if isinstance(have, Partial):
            # A reduce_scatter sends half of the bytes now, and a later all_gather the other half. So this is only
            # cheaper if other values are divided alike already.
            if isinstance(wanted, Shard):
                return (2 * size, size) if self._can(wanted, ways) else None
            return (2 * size, 0)
        if isinstance(wanted, Replicate):
            return (size * self.weight, 0)
        # An all_to_all sends fewer bytes, but it divides another dimension, often the batch, of all values that follow.
        # So it costs as much as a gather, and is chosen only if nothing else works.
        return (size * self.weight, size) if self._can(wanted, ways) else None

    def _can(self, wanted: Placement, ways: int) -> bool:
        return isinstance(self.whole, TensorSpec) and divides(self.whole.shape, wanted, ways)

    def add(self, placement: Placement, node: fx.Node) -> fx.Node:
        """Add a version. It replaces a partial sum, so that each partial sum is summed only once."""
        self.versions[placement] = node
        self.versions = {p: n for p, n in self.versions.items() if p == placement or not isinstance(p, Partial)}
        return node


def can_exchange(have: Shard, wanted: Shard) -> bool:
    """Whether one all_to_all changes parts along one dimension into parts along another."""
    return have.dim != wanted.dim and have.blocks == wanted.blocks == 1
