"""What the installed PyTorch's own graph passes make of a step: what they reduce together, and in what order.

The passes of `torch._inductor.fx_passes` run on the unfused graph of the very step, with fake tensors in place of
values and a process group that moves nothing. Seconds, where a pass asks for them, are those of our own cost model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import fx
from torch._guards import TracingContext, tracing
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _runtime_estimation
from torch.utils._pytree import tree_map

from commfuse_fx.cost.model import CostModel, profile_key
from commfuse_fx.ir.core.collectives import c10d, collective_of, is_start, is_wait
from commfuse_fx.ir.core.dependence import Dependence
from commfuse_fx.ir.core.meta import Spec, TensorSpec, info
from commfuse_fx.ir.core.order import stable_sort
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import Pass

aten = torch.ops.aten

DDP_BUCKET_MIB = 25
"""What `torch._inductor.config._fuse_ddp_bucket_size` and DistributedDataParallel have by default."""


@dataclass(frozen=True)
class TorchPlan:
    """buckets: the names of the parameters of each collective. order: the step from its first node to its last one,
    as names of nodes, ("start", bucket) and ("wait", bucket).

    reason: why the pass could not run; then both are empty.
    """

    buckets: tuple[tuple[str, ...], ...] = ()
    order: tuple[str | tuple[str, int], ...] = ()
    reason: str = ""


Transform = Callable[[fx.GraphModule], None]


def fuse_ddp(graph_module: fx.GraphModule) -> None:
    """`ddp_fusion`: buckets of 25 MiB, the first one of 1 MiB, then each wait as late as possible."""
    from torch._inductor.fx_passes.ddp_fusion import fuse_ddp_communication

    passes: list[Callable[..., None] | str] = ["fuse_ddp_with_concat_op", "schedule_comm_wait"]
    fuse_ddp_communication(graph_module.graph, passes, DDP_BUCKET_MIB)


def bucket_all_reduces(graph_module: fx.GraphModule) -> None:
    """`bucketing`: neighbours, up to 2000 MB."""
    from torch._inductor.fx_passes.bucketing import bucket_all_reduce

    bucket_all_reduce(graph_module)


def overlap_scheduling(program: Program, costs: CostModel) -> Transform:
    """`overlap_scheduling` with its bucketing switched on, priced with these costs."""
    by_name = {node.name: costs.compute_seconds(node) for node in program.graph.nodes if node.op == "call_function"}
    starts = {node.name: node for node in program.collectives()}
    some_start = next(iter(starts.values()))

    def milliseconds(node: fx.Node, nbytes: int | None) -> float | None:
        if is_start(node):
            # A bucket that the pass is trying out has no counterpart in the program.
            size = tensor_nbytes(node) if nbytes is None else nbytes
            return costs.cost_of(starts.get(node.name, some_start), size, mesh=program.mesh).seconds * 1e3
        return by_name.get(node.name, 0.0) * 1e3

    def transform(graph_module: fx.GraphModule) -> None:
        from torch._inductor import config
        from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing

        # Its own dependences between buckets form cycles on some graphs; this is the way out that it names then.
        fixed = {"aten_distributed_optimizations.overlap_scheduling_autofix_cycles": True}
        with _device_figures(costs), config.patch(fixed):
            schedule_overlap_bucketing(
                graph_module,
                collective_bucketing=True,
                custom_runtime_estimation=milliseconds,
                compute_estimator="analytical",
            )

    return transform


def tensor_nbytes(node: fx.Node) -> int:
    """Bytes of the fake tensor of a node."""
    value = node.meta["val"]
    return int(value.numel() * value.element_size())


class TorchGraph:
    """The unfused step as PyTorch's passes expect it: its forward and backward, which return the reduced gradients.

    unfused: the program as it is before its collectives are merged. divided: gradients are divided by the number of
    ranks before they are summed, as DistributedDataParallel does, which `ddp_fusion` looks for.
    """

    def __init__(self, unfused: Program, *, divided: bool) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.divided = divided
        self.group_size = unfused.mesh.world
        program = unfused.copy()
        self.constants = dict(program.constants)
        self._drop_updates(program)
        with _fake_world(self.group_size) as group_name:
            self._name_groups(program, group_name)
            self.graph = program.graph
            self._propagate()

    def _drop_updates(self, program: Program) -> None:
        """Leave out the optimizer, which PyTorch compiles apart from the step."""
        graph = program.graph
        waits = [node for node in graph.nodes if is_wait(node)]
        program.output.args = ((program.loss, *waits),)
        for node in reversed(list(graph.nodes)):
            if info(node).phase == "update" and node.op == "call_function" and not node.users:
                graph.erase_node(node)
        kept = dict.fromkeys(waits)
        for node in reversed(list(graph.nodes)):
            if node.op == "call_function" and not node.users and node not in kept and _is_dead(node):
                graph.erase_node(node)

    def _name_groups(self, program: Program, group_name: str) -> None:
        self.members: dict[str, tuple[str, ...]] = {}  # node that is reduced -> parameters
        for start in list(program.collectives()):
            details = collective_of(start)
            value = start.args[0]
            assert isinstance(value, fx.Node)
            self.members[value.name] = details.members
            start.args = (value, details.reduce_op, group_name)
            if self.divided:
                with program.graph.inserting_before(start):
                    quotient = program.graph.call_function(aten.div.Tensor, (value, self.group_size))
                start.args = (quotient, "sum", group_name)
        self.names = {node.name: profile_key(node) for node in program.graph.nodes if "commfuse" in node.meta}

    def _propagate(self) -> None:
        """Fake tensors for all nodes, with the aliases between them."""
        module = _module(self.graph, self.constants)
        with self.mode:
            inputs = [_fake(info(node).spec) for node in self.graph.nodes if node.op == "placeholder"]
        FakeTensorProp(module, self.mode).propagate_dont_convert_inputs(*inputs)
        self.graph = module.graph
        for node in self.graph.nodes:
            if "val" in node.meta:
                node.meta["tensor_meta"] = tree_map(_metadata, node.meta["val"])

    def plan(self, transform: Transform, ranks: int | None = None) -> TorchPlan:
        """What a pass makes of a copy of the graph; when it raises, a plan with the reason.

        ranks: of the process group that the pass finds; None: as many as the unfused program has. The graph itself is
        the same for any number.
        """
        graph = fx.Graph()
        same: dict[fx.Node, fx.Node] = {}
        result = graph.graph_copy(self.graph, same)
        output = graph.output(result)
        output.meta = dict(self.graph.output_node().meta)
        module = _module(graph, self.constants)
        names = {node.name: new for node, new in ((old, same.get(old)) for old in self.graph.nodes) if new is not None}
        known = {new: name for name, new in names.items()}
        try:
            with _fake_world(ranks or self.group_size), V.set_fake_mode(self.mode), tracing(TracingContext(self.mode)):
                transform(module)
        # A private part of another library: whatever it raises is the finding.
        except Exception as error:
            return TorchPlan(reason=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return self._read(module.graph, known)

    def _read(self, graph: fx.Graph, known: dict[fx.Node, str]) -> TorchPlan:
        """The plan that a transformed graph stands for. `known`: nodes that were there before, by their names."""
        buckets: list[tuple[str, ...]] = []
        number: dict[fx.Node, int] = {}
        order: list[str | tuple[str, int]] = []
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if is_start(node) or node.target is c10d.all_reduce_coalesced.default:
                number[node] = len(buckets)
                order.append(("start", len(buckets)))
                reduced = self._reduced(node, known)
                buckets.append(tuple(name for value in reduced for name in self.members[value]))
            elif is_wait(node):
                start = node.all_input_nodes[0]
                if start.target is operator.getitem:  # one result of several
                    start = start.all_input_nodes[0]
                order.append(("wait", number[start]))
            elif known.get(node) in self.names:
                order.append(self.names[known[node]])
        return TorchPlan(tuple(buckets), tuple(order))

    def _reduced(self, start: fx.Node, known: dict[fx.Node, str]) -> list[str]:
        """The gradients that a collective reduces, in the order of its buffer."""
        found: dict[str, None] = {}
        pending = [start.args[0]]
        while pending:
            value = pending.pop()
            if isinstance(value, (list, tuple)):
                pending.extend(reversed(value))
            elif isinstance(value, fx.Node) and known.get(value) in self.members:
                found[known[value]] = None
            elif isinstance(value, fx.Node):
                pending.extend(reversed(value.all_input_nodes))
        return list(found)


@dataclass(frozen=True)
class GivenOrder(Pass):
    """Puts a program, with its collectives merged as a plan says, into the order of that plan.

    Nodes that the plan does not know stand as early as their inputs allow, updates at the end.
    """

    name = "given_order"
    requires = ("averaged",)
    ensures = ("scheduled",)

    plan: TorchPlan

    def __call__(self, program: Program) -> bool:
        place: dict[str | tuple[str, int], float] = {}
        for i, entry in enumerate(self.plan.order):
            place.setdefault(entry, float(i))
        bucket_of = {name: i for i, bucket in enumerate(self.plan.buckets) for name in bucket}
        position: dict[fx.Node, float] = {}
        for node in program.graph.nodes:
            position[node] = self._place(node, place, bucket_of, position)
        stable_sort(program.graph, position, Dependence(program.graph, program.aliases()).direct)
        return True

    def _place(
        self,
        node: fx.Node,
        place: dict[str | tuple[str, int], float],
        bucket_of: dict[str, int],
        position: dict[fx.Node, float],
    ) -> float:
        end = float(len(self.plan.order))
        if node.op != "call_function":
            return end + 1 if node.op == "output" else -1.0
        if is_start(node):
            return place["start", _bucket(node, bucket_of)]
        if is_wait(node):
            start = node.args[0]
            assert isinstance(start, fx.Node)
            return place["wait", _bucket(start, bucket_of)]
        if info(node).phase == "update":
            return end
        found = place.get(profile_key(node))
        if found is not None:
            return found
        return max((position[value] for value in node.all_input_nodes), default=-1.0)


def _bucket(start: fx.Node, bucket_of: dict[str, int]) -> int:
    details = collective_of(start)
    return bucket_of[details.members[0]]


def is_partition(plan: TorchPlan, program: Program) -> bool:
    """Whether a plan has every parameter that the unfused program reduces in one bucket, and waits for each bucket."""
    reduced = [name for start in program.collectives() for name in _members(start)]
    planned = [name for bucket in plan.buckets for name in bucket]
    entries = dict.fromkeys(entry for entry in plan.order if not isinstance(entry, str))
    wanted = [(kind, i) for i in range(len(plan.buckets)) for kind in ("start", "wait")]
    return sorted(planned) == sorted(reduced) and all(each in entries for each in wanted)


def _members(start: fx.Node) -> tuple[str, ...]:
    details = collective_of(start)
    return details.members


def _is_dead(node: fx.Node) -> bool:
    """Nobody uses it, and it changes nothing."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or not schema.is_mutable


def _metadata(value: Any) -> Any:
    return _extract_tensor_metadata(value) if isinstance(value, torch.Tensor) else value


def _fake(spec: Spec) -> Any:
    if isinstance(spec, TensorSpec):
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    return None if spec is None else [_fake(item) for item in spec]


def _module(graph: fx.Graph, constants: dict[str, torch.Tensor]) -> fx.GraphModule:
    root = torch.nn.Module()
    for name, constant in constants.items():
        root.register_buffer(name, constant, persistent=False)
    return fx.GraphModule(root, graph)


@contextmanager
def _device_figures(costs: CostModel) -> Iterator[None]:
    """The pass also works out a roofline of its own, only to log it, with figures that it asks Triton for."""
    device = costs.cluster.device
    flops = device.flops.get("f32", next(iter(device.flops.values())))
    bandwidth = device.memory_bandwidth / 1e9
    figures = {
        "get_device_tflops": flops / 1e12,
        "get_gpu_dram_gbps": bandwidth,  # up to torch 2.13
        "get_device_dram_gbps": bandwidth,
    }
    with ExitStack() as stack:
        for name, figure in figures.items():
            if hasattr(_runtime_estimation, name):
                stack.enter_context(mock.patch.object(_runtime_estimation, name, return_value=figure))
        yield


@contextmanager
def _fake_world(ranks: int) -> Iterator[str]:
    """A default process group of this many ranks, in this process alone, that moves nothing."""
    if dist.is_initialized():
        raise RuntimeError("PyTorch's passes are read in a process without a process group; destroy it first")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield dist.group.WORLD.group_name  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()
