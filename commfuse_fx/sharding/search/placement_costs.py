"""What it takes to bring a value of the graph from one placement to another, in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from math import inf
from types import MappingProxyType

from commfuse_fx.cost.collective_cost import CollectiveCost, collective_cost
from commfuse_fx.ir.core.placement import Partial, Placement, Replicate, Shard
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.sharding.dividing.divided_value import can_exchange
from commfuse_fx.sharding.search.exposure import GRADIENT


class PlacementCosts:
    """Prices of changes of layout on one group of ranks.

    ranks: of one group; all of them lie alike in the cluster, or this is the one over the slowest links.
    exposed: the part of the time of a collective that counts, as compute may hide the rest, by its kind in `Exposure`;
        all where nothing is said. Those of gradients are fused, unless `of` makes prices of another kind.
    """

    def __init__(
        self, cluster: ClusterSpec, ranks: tuple[int, ...], exposed: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        self._exposed = exposed
        self._part = 1.0
        self._fused_part = exposed.get(GRADIENT, 1.0)
        self._cluster = cluster
        self._ranks = ranks
        self._ways = len(ranks)
        self._known: dict[tuple[str, float], CollectiveCost] = {}

    def key(self, fused: bool) -> tuple[object, ...]:
        """What prices depend on in one cluster. fused: those of collectives that are sent with others."""
        return self._ranks, self._fused_part if fused else self._part

    def of(self, kind: str) -> PlacementCosts:
        """The prices of collectives of this kind."""
        found = copy(self)
        found._part = found._fused_part = self._exposed.get(kind, 1.0)
        return found

    def change(self, nbytes: float, have: Placement, wanted: Placement, fused: bool = False) -> float:
        """Seconds of bringing a tensor of so many bytes from one placement to another; infinity if it is impossible.

        The bytes are those of the tensor as it lies on other axes, whole on this one.
        fused: whether the collective is sent with others, so that only its bytes count.
        """
        if have == wanted:
            return 0.0
        copied = 2 * nbytes / self._cluster.device.memory_bandwidth
        if isinstance(wanted, Partial):
            return copied if isinstance(have, Replicate) else inf
        if isinstance(have, Replicate):
            return copied / self._ways
        if isinstance(have, Partial) and isinstance(wanted, Shard):
            return self.seconds("reduce_scatter", nbytes, fused) + copied * (fused or _is_rearranged(wanted))
        if isinstance(have, Partial):
            return self.seconds("all_reduce", nbytes, fused)
        gathered = self.seconds("all_gather", nbytes, fused) + copied * _is_rearranged(have)
        if isinstance(wanted, Replicate):
            return gathered
        if can_exchange(have, wanted):
            return self.seconds("all_to_all", nbytes / self._ways, fused) + 2 * copied / self._ways
        return gathered + copied / self._ways

    def seconds(self, kind: str, nbytes: float, fused: bool = False) -> float:
        """Seconds of a collective of a change, inside of an op, or that is in the graph already."""
        known = self._known.get((kind, nbytes))
        if known is None:
            known = self._known[kind, nbytes] = collective_cost(kind, nbytes, self._ranks, self._cluster)
        if fused:
            return known.transfer * self._fused_part
        return known.seconds * self._part + self._cluster.device.collective_overhead


def _is_rearranged(placement: Shard) -> bool:
    """Whether parts of a tensor do not lie one after another in the whole, so that it is copied for a collective."""
    return placement.dim != 0 or placement.blocks != 1
