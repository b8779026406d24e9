"""What each node of a graph costs on a cluster: measured where a profile knows it, modelled where it does not.

Why: docs/decisions.md, "A profile is keyed by the names of nodes".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from torch import fx

from commfuse_fx.cost.collective_cost import CollectiveCost, collective_cost
from commfuse_fx.cost.roofline import is_free, roofline_seconds
from commfuse_fx.cost.transfer import Transfer
from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.ir.core.collectives import collective_of
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.meta import Spec, TensorSpec, info
from commfuse_fx.ir.core.naming import op_label
from commfuse_fx.ir.rows.owned_work import share_of_rank
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.machine.source import Costs

PER_ELEMENT = "update.per_element/"
"""Keys of measured parameter updates: this and the op's name, such as `update.per_element/_fused_adamw_`."""

PER_VIEW = "view.each/"
"""Keys of what an op takes that moves no data, whatever its node: this and the op's name, such as
`view.each/as_strided`. Passes make such nodes under names that depend on the plan."""

OVERHEAD = "step.overhead"
"""Key of what a measured step takes besides its nodes and its communication: votes, looking up its plan, threads that
are woken late."""


def profile_key(node: fx.Node) -> str:
    """The name under which a profile knows a node: that of the node it came from, else its own."""
    details = info(node)
    return details.origin or details.name


def update_elements(node: fx.Node) -> float:
    """Elements of the parameters that an update works on: those of the tensors in its first list; 0 without one.

    Of what one rank of a group owns it counts what each rank has on the average.
    """
    for arg in node.args:
        if isinstance(arg, (list, tuple)):
            return sum(_numel(info(item).spec) for item in arg if isinstance(item, fx.Node)) * share_of_rank(node)
        if isinstance(arg, fx.Node) and isinstance(info(arg).spec, tuple):
            return _numel(info(arg).spec) * share_of_rank(node)
    return 0


def _numel(spec: Spec) -> int:
    if isinstance(spec, TensorSpec):
        return spec.numel
    return sum(_numel(item) for item in spec) if spec else 0


@dataclass(frozen=True)
class CostModel:
    """A cost model prices compute nodes and collectives.

    cluster: devices and network.
    node_seconds: measured seconds by `profile_key`. Updates, whose size changes with fusion, have seconds per
        element by `PER_ELEMENT` and the op's name; views that have no measurement of their own have seconds by
        `PER_VIEW` and the op's name.
    node_roofline: what the roofline says of the same nodes as they were measured, on the device of the cluster. A node
        that is another part of a divided op now takes so many times as long as the roofline says now. One without an
        entry takes what was measured.

    Raises ConfigTypeError for other things than mappings, ConfigValueError for times below 0 or not finite.
    """

    cluster: ClusterSpec
    node_seconds: Mapping[str, float] | None = None
    node_roofline: Mapping[str, float] | None = None
    _costs: dict[Any, CollectiveCost] = field(default_factory=dict, init=False, repr=False, compare=False)
    _distinct: dict[Any, list[tuple[int, ...]]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.node_seconds is None:
            return
        if not isinstance(self.node_seconds, Mapping):
            raise ConfigTypeError(f"node_seconds={self.node_seconds!r} must map names of nodes to seconds")
        for key, seconds in self.node_seconds.items():
            if not (isfinite(seconds) and seconds >= 0):
                raise ConfigValueError(f"node_seconds[{key!r}]={seconds!r}: give seconds, finite and not below 0")

    @property
    def step_overhead(self) -> float:
        """Seconds of compute that every step takes besides its nodes; 0 where that was not measured."""
        return self.node_seconds.get(OVERHEAD, 0.0) if self.node_seconds else 0.0

    def compute_seconds(self, node: fx.Node) -> float:
        """Seconds that a node keeps the compute stream busy for, with nothing on the wire.

        What is computed once takes no time in a step.
        """
        measured = self.node_seconds
        if info(node).once:
            return 0.0
        if measured and node.op == "call_function":
            if info(node).phase == "update":
                # Before its own name: how much an update works on changes with fusion.
                each = measured.get(PER_ELEMENT + op_label(node.target))
                if each is not None:
                    return self.cluster.device.op_overhead + each * update_elements(node)
            seconds = measured.get(profile_key(node))
            if seconds is not None:
                return self._of_part(node, seconds)
            if is_free(node):
                seconds = measured.get(PER_VIEW + op_label(node.target))
            if seconds is not None:
                return seconds
        return roofline_seconds(node, self.cluster.device)

    def measured(self, node: fx.Node) -> tuple[float, float] | None:
        """Seconds of a node as it was measured, and those of the roofline for the same part; None if either is not
        known."""
        if not self.node_seconds or not self.node_roofline or node.op != "call_function":
            return None
        seconds, modelled = (known.get(profile_key(node)) for known in (self.node_seconds, self.node_roofline))
        return (seconds, modelled) if seconds is not None and modelled else None

    def _of_part(self, node: fx.Node, seconds: float) -> float:
        """seconds: what was measured under this node's name, of which it may be one of several pieces."""
        share, known = info(node).share, self.measured(node)
        if share != 1.0 or known is None:
            return seconds * share
        now = roofline_seconds(node, self.cluster.device)
        return seconds if now == known[1] else seconds * now / known[1]

    def cost_of(self, start: fx.Node, nbytes: int | None = None, *, mesh: Mesh) -> CollectiveCost:
        """What the collective of a start node costs; `nbytes` for a piece of its payload.

        Its groups can lie differently in the cluster: it is that of the most expensive one, on every rank. A step waits
        for that one, and prices of each rank's own group would make plans that differ.
        """
        details = collective_of(start)
        size = details.nbytes if nbytes is None else nbytes
        key = (details.kind, size, details.group, mesh)
        if key not in self._costs:
            costs = [
                collective_cost(details.kind, size, ranks, self.cluster)
                for ranks in self._distinct_groups(mesh, details.group)
            ]
            self._costs[key] = max(costs, key=lambda cost: cost.seconds)
        return self._costs[key]

    def transfer_of(self, start: fx.Node, nbytes: int | None = None, *, mesh: Mesh) -> Transfer:
        """The same cost for the simulator. Its stream is the group, written as mesh axes."""
        cost = self.cost_of(start, nbytes, mesh=mesh)
        details = collective_of(start)
        extra = cost.burst, cost.boost, cost.slowed, cost.busy_speed, cost.last
        return Transfer(details.group, cost.latency, cost.transfer, cost.host, cost.links, *extra)

    def remembering(self) -> RememberingModel:
        """The same prices, for asking again and again about one graph."""
        return RememberingModel(self.cluster, self.node_seconds, self.node_roofline)

    def _distinct_groups(self, mesh: Mesh, group: str) -> list[tuple[int, ...]]:
        """Of the groups along these axes, one of each way in which they lie in the cluster."""
        key = (mesh, group)
        if key not in self._distinct:
            self._distinct[key] = self.cluster.distinct(mesh.groups(group))
        return self._distinct[key]


@dataclass(frozen=True)
class RememberingModel(CostModel):
    """Works out each node's price once. For a graph whose nodes are moved, but keep their arguments.

    A node is priced anew where it calls another op, or where its memory is no longer kept between steps.
    """

    _seconds: dict[fx.Node, tuple[Any, bool, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def compute_seconds(self, node: fx.Node) -> float:
        target, kept = node.target, info(node).kept
        known = self._seconds.get(node)
        if known is None or known[0] is not target or known[1] is not kept:
            known = self._seconds[node] = (target, kept, super().compute_seconds(node))
        return known[2]


def cost_model(costs: Costs) -> CostModel:
    """The prices of compute nodes and collectives on a cluster, or by a profile of the step."""
    if isinstance(costs, ClusterSpec):
        return CostModel(costs)
    return CostModel(costs.cluster, costs.node_seconds, costs.node_roofline)
