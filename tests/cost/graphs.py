"""Small programs written by hand, and prices that make their schedules easy to work out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.cost.model import CostModel
from commfuse_fx.cost.transfer import Transfer
from commfuse_fx.ir.core.collectives import WAIT, c10d, collective_of
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.meta import CollectiveInfo, NodeInfo, Spec, TensorSpec, info, set_info
from commfuse_fx.ir.core.program import Program, Source
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.machine.cluster_parts import Device, Level

aten = torch.ops.aten

CORE = Device(
    name="core",
    flops={"f64": 30e9, "f32": 60e9},
    memory_bandwidth=10e9,
    memory_bytes=8 << 30,
    op_overhead=4e-6,
)
TCP = Level(name="tcp", alpha=5e-5, bandwidth=1e9, host_seconds_per_byte=2e-10)
CLUSTER = ClusterSpec(name="cores over TCP", device=CORE, levels=(TCP,))


def f32(*shape: int) -> TensorSpec:
    return TensorSpec((0,), torch.float32, (1,)).with_shape(shape)


@dataclass(frozen=True)
class Priced(CostModel):
    """Nodes take the seconds given for their name, else none; so do the collectives."""

    cluster: ClusterSpec = CLUSTER
    computes: Mapping[str, float] = field(default_factory=dict)
    moves: Mapping[str, Transfer] = field(default_factory=dict)

    def compute_seconds(self, node: fx.Node) -> float:
        return self.computes.get(info(node).name, 0.0)

    def transfer_of(self, start: fx.Node, nbytes: int | None = None, *, mesh: Mesh) -> Transfer:
        whole = self.moves[info(start).name]
        if nbytes is None:
            return whole
        details = collective_of(start)
        part = nbytes / details.nbytes
        return Transfer(
            whole.stream,
            whole.latency,
            whole.transfer * part,
            whole.host * part,
            whole.links,
            whole.burst,
            whole.boost,
            whole.slowed,
            whole.busy_speed,
            whole.last,
        )


class Graph:
    """Writes a program node by node. Values are f32[4] unless said otherwise."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.sources: dict[fx.Node, Source] = {}

    def input(self, name: str, spec: Spec = None, kind: str = "input") -> fx.Node:
        node = set_info(self.graph.placeholder(name), NodeInfo("input", spec or f32(4), name=name))
        self.sources[node] = Source(kind, name)
        return node

    def op(
        self, name: str, *args: object, target: object = aten.add.Tensor, spec: Spec = None, **fields: object
    ) -> fx.Node:
        """A call; without a target the sum of its two arguments, or of one with itself."""
        if target is aten.add.Tensor and len(args) == 1:
            args *= 2
        phase = str(fields.pop("phase", "backward"))
        node = self.graph.call_function(target, args)  # type: ignore[arg-type]
        set_info(node, NodeInfo(phase, spec or f32(4), name=name))
        for key, value in fields.items():
            setattr(info(node), key, value)
        return node

    def start(self, name: str, value: fx.Node, group: str = "dp", **fields: object) -> fx.Node:
        spec = info(value).spec
        assert isinstance(spec, TensorSpec)
        details = CollectiveInfo("all_reduce", group, spec.dtype, spec.nbytes, (name,), 0, "sum")
        return self.op(
            name, value, "sum", group, target=c10d.all_reduce_.default, spec=spec, collective=details, **fields
        )

    def wait(self, start: fx.Node, **fields: object) -> fx.Node:
        return self.op(f"{info(start).name}.wait", start, target=WAIT, spec=info(start).spec, **fields)

    def program(self, loss: fx.Node) -> Program:
        set_info(self.graph.output((loss,)), NodeInfo("update", name="output"))
        config = CompileConfig.resolve({})
        return Program(self.graph, Mesh((2, 2), ("dp", "tp")), config, {}, self.sources, True, loss)
