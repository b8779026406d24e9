"""What a division of the graph knows about one value: in which layouts it exists, and what others cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from commfuse_fx.ir.meta import Spec, TensorSpec
from commfuse_fx.ir.placement import Partial, Placement, R, Replicate, Shard, divides

Cost = tuple[int, int]
"""(bytes on the wire, bytes that are cut out of a whole tensor): compared in this order."""

FREE: Cost = (0, 0)


@dataclass
class Value:
    """One value of the graph that is being divided.

    whole: its spec before the division. versions: the layouts in which the new graph has it. pending: the node that
    computes it, while no layout has been decided (a parameter without a mark, or a view of one): then any that it can
    have is free. weight: what gathering it costs, times the bytes; more than 1 for what the user wants divided.
    """

    whole: Spec
    versions: dict[Placement, fx.Node] = field(default_factory=dict)
    pending: fx.Node | None = None
    weight: int = 1

    @property
    def is_whole(self) -> bool:
        """Every rank has all of it, and nothing else is on offer."""
        return self.pending is None and len(self.versions) == 1 and R in self.versions

    def nearest(self, wanted: Placement, ways: int) -> tuple[Cost, Placement] | None:
        """The cheapest version to make `wanted` from, or None."""
        best: tuple[Cost, Placement] | None = None
        for have in self.versions:
            cost = self.transition(have, wanted, ways)
            if cost is not None and (best is None or cost < best[0]):
                best = (cost, have)
        return best

    def transition(self, have: Placement, wanted: Placement, ways: int) -> Cost | None:
        """What it costs to go from one placement to another; None where that is impossible."""
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
            # Half of it goes over the wire now, and what has been divided here is gathered further on. So this pays
            # only where other values are divided like that already.
            if isinstance(wanted, Shard):
                return (2 * size, size) if self._can(wanted, ways) else None
            return (2 * size, 0)
        if isinstance(wanted, Replicate):
            return (size * self.weight, 0)
        # An all_to_all sends less, but what it leaves divides another dimension, often the batch, and everything that
        # follows with it: this is done where there is no other way, not to save bytes.
        return (size * self.weight, size) if self._can(wanted, ways) else None

    def _can(self, wanted: Placement, ways: int) -> bool:
        return isinstance(self.whole, TensorSpec) and divides(self.whole.shape, wanted, ways)

    def add(self, placement: Placement, node: fx.Node) -> fx.Node:
        """A new version. Once a partial sum has been summed, everybody uses the result: it is summed once."""
        self.versions[placement] = node
        self.versions = {p: n for p, n in self.versions.items() if p == placement or not isinstance(p, Partial)}
        return node


def can_exchange(have: Shard, wanted: Shard) -> bool:
    """Whether one all_to_all leads from parts along one dimension to parts along another."""
    return have.dim != wanted.dim and have.blocks == wanted.blocks == 1
