"""What each node of a graph costs on a cluster: measured where a profile knows it, modelled where it does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from torch import fx

from commfuse_fx.cost.cluster import ClusterSpec
from commfuse_fx.cost.collectives import CollectiveCost, collective_cost
from commfuse_fx.cost.engine import Transfer
from commfuse_fx.cost.roofline import roofline_seconds
from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.ir.mesh import Mesh
from commfuse_fx.ir.meta import Spec, TensorSpec, info
from commfuse_fx.ir.naming import op_label

PER_ELEMENT = "update.per_element/"
"""Keys of measured parameter updates: this and the op's name, such as `update.per_element/_fused_adamw_`."""


def profile_key(node: fx.Node) -> str:
    """The name under which a profile knows a node: that of the node it came from, else its own."""
    details = info(node)
    return details.origin or details.name


def update_elements(node: fx.Node) -> int:
    """Elements of the parameters that an update works on: those of the tensors in its first list; 0 without one."""
    for arg in node.args:
        if isinstance(arg, (list, tuple)):
            return sum(_numel(info(item).spec) for item in arg if isinstance(item, fx.Node))
        if isinstance(arg, fx.Node) and isinstance(info(arg).spec, tuple):
            return _numel(info(arg).spec)
    return 0


def _numel(spec: Spec) -> int:
    if isinstance(spec, TensorSpec):
        return spec.numel
    return sum(_numel(item) for item in spec) if spec else 0


@dataclass(frozen=True)
class CostModel:
    """Prices of compute nodes and collectives.

    cluster: devices and network. node_seconds: measured seconds by `profile_key`, and seconds per element of the
    parameters by `PER_ELEMENT` and the op's name for updates, whose size changes with fusion.
    Raises ConfigTypeError for other things than mappings, ConfigValueError for times below 0 or not finite.
    """

    cluster: ClusterSpec
    node_seconds: Mapping[str, float] | None = None
    _costs: dict[Any, CollectiveCost] = field(default_factory=dict, init=False, repr=False, compare=False)
    _ranks: dict[Any, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.node_seconds is None:
            return
        if not isinstance(self.node_seconds, Mapping):
            raise ConfigTypeError(f"node_seconds={self.node_seconds!r} must map names of nodes to seconds")
        for key, seconds in self.node_seconds.items():
            if not (isfinite(seconds) and seconds >= 0):
                raise ConfigValueError(f"node_seconds[{key!r}]={seconds!r}: give seconds, finite and not below 0")

    def compute_seconds(self, node: fx.Node) -> float:
        """Seconds that a node keeps the compute stream busy for, with nothing on the wire."""
        measured = self.node_seconds
        if measured and node.op == "call_function":
            seconds = measured.get(profile_key(node))
            if seconds is not None:
                return seconds
            if info(node).phase == "update":
                each = measured.get(PER_ELEMENT + op_label(node.target))
                if each is not None:
                    return each * update_elements(node)
        return roofline_seconds(node, self.cluster.device)

    def cost_of(self, start: fx.Node, nbytes: int | None = None, *, mesh: Mesh, rank: int = 0) -> CollectiveCost:
        """What the collective of a start node costs the group of `rank`; `nbytes` for a piece of its payload."""
        details = info(start).collective
        assert details is not None, "a start carries what its collective does"
        size = details.nbytes if nbytes is None else nbytes
        key = (details.kind, size, details.group, mesh, rank)
        if key not in self._costs:
            ranks = self._group(mesh, details.group, rank)
            self._costs[key] = collective_cost(details.kind, size, ranks, self.cluster)
        return self._costs[key]

    def transfer_of(self, start: fx.Node, nbytes: int | None = None, *, mesh: Mesh, rank: int = 0) -> Transfer:
        """The same for the engine. Its stream is the group, written as mesh axes."""
        cost = self.cost_of(start, nbytes, mesh=mesh, rank=rank)
        details = info(start).collective
        assert details is not None
        return Transfer(details.group, cost.latency, cost.transfer, cost.host, cost.links)

    def _group(self, mesh: Mesh, group: str, rank: int) -> tuple[int, ...]:
        key = (mesh, group, rank)
        if key not in self._ranks:
            self._ranks[key] = mesh.ranks(group, rank)
        return self._ranks[key]
