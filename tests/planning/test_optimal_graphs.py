"""Mode "optimal" on whole small graphs, through the real passes, against every plan there is.

Every partition of the collectives into buckets, in every order of issue, is made into a program by the same passes and
played by the same simulator. Where only computing and one FIFO stream count (nothing is copied, no core is shared, one
price line for all sizes), no plan beats mode "optimal". Each other test says what it leaves out of the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import fx

import commfuse_fx as cf
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.cost.model import cost_model
from commfuse_fx.ir.core.collectives import WAIT, c10d, collective_of
from commfuse_fx.ir.core.dependence import Dependence
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.meta import CollectiveInfo, NodeInfo, info, set_info
from commfuse_fx.ir.core.order import reorder, stable_sort
from commfuse_fx.ir.core.program import OptimizerGroup, OptimizerInfo, Parameter, Program, Source
from commfuse_fx.passes.declaration import Situation, Variant, Variants
from commfuse_fx.planning import compile_call
from commfuse_fx.planning.compile_call import plan_step
from commfuse_fx.planning.pipeline.recipe import build_pipeline
from commfuse_fx.simulate.rounds import play
from commfuse_fx.solvers.buckets import cyclic_buckets
from tests.cost.graphs import f32
from tests.planning.chains import chain

aten = torch.ops.aten

OPTIMAL: dict[str, Any] = {"allreduce": {"mode": "optimal", "config": None}}
BY_ID: dict[str, Any] = {"openstate": True}
FIXED: list[dict[str, Any]] = [
    {"openstate": False},
    *({"allreduce": {"mode": "size", "config": mib}} for mib in (1, 4, 25, 64)),
]
FLAGS = {"momentum": False, "dampening": 0.0, "nesterov": False, "maximize": False, "weight_decay": 0.0}

ONE_LINE = (2, 3, 4, 8)
"""Numbers of ranks at which one algorithm is the cheapest for all sizes."""
TWO_LINES = (5, 6, 7)
"""Here it is the tree for small and the ring for large messages."""

Partition = list[list[int]]


# Programs.


def cluster(ranks: int, alpha: float, bandwidth: float = 1e9, host: float = 0.0, **device: float) -> cf.ClusterSpec:
    """One level; by default of devices that compute only what a profile says, at no other cost."""
    free = {"memory_bandwidth": 1e30, "op_overhead": 0.0, **device}
    core = cf.Device(name="core", flops={"f32": 1e30}, memory_bytes=2**40, **free)
    level = cf.Level(name="net", alpha=alpha, bandwidth=bandwidth, host_seconds_per_byte=host)
    return cf.ClusterSpec(name="one level", device=core, levels=(level,), ranks=ranks)


@dataclass
class Writer:
    """Writes a step: a chain of compute of given lengths, and values that become ready along it."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    sources: dict[fx.Node, Source] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def input(self, kind: str, name: str, numel: int) -> fx.Node:
        node = set_info(self.graph.placeholder(name), NodeInfo("input", f32(numel), name=name))
        self.sources[node] = Source(kind, name)
        return node

    def op(self, name: str, target: Any, *args: Any, numel: int = 1) -> fx.Node:
        return set_info(self.graph.call_function(target, args), NodeInfo("backward", f32(numel), name=name))

    def run(self, value: fx.Node, seconds: float) -> fx.Node:
        """Compute for so long from `value`."""
        name = f"run.{len(self.seconds)}"
        self.seconds[name] = seconds
        return self.op(name, aten.sin.default, value)

    def program(self, world: cf.ClusterSpec, loss: fx.Node, **fields: Any) -> Program:
        grads = fields.get("grads", {})
        set_info(self.graph.output((loss, *grads.values())), NodeInfo("update", name="output"))
        assert world.ranks is not None
        profile = cf.StepProfile(cluster=world, world=world.ranks, model="0" * 64, node_seconds=self.seconds)
        config = CompileConfig.resolve({"comm_fusion": OPTIMAL, "cluster": profile})
        program = Program(
            self.graph, Mesh((world.ranks,), ("dp",)), config, fields.pop("params", {}), {}, True, loss, **fields
        )
        for node in self.graph.nodes:
            program.names.reserve(info(node).name)
        for node, source in self.sources.items():
            program.add_source(node, source)
        return program


def training_step(world: cf.ClusterSpec, gradients: Sequence[tuple[float, int]], tail: float, update: bool) -> Program:
    """gradients: (seconds of compute before it, elements); tail: seconds behind the last; update: by SGD, or not."""
    writer = Writer()
    params = {f"p{i}": Parameter(f"p{i}", f32(numel), True, i) for i, (_, numel) in enumerate(gradients)}
    inputs = [writer.input("parameter", name, param.spec.numel) for name, param in params.items()]
    value = writer.input("input", "x", 1)
    grads: dict[str, fx.Node] = {}
    for name, param, (seconds, numel) in zip(params, inputs, gradients, strict=True):
        value = writer.run(value, seconds)
        grads[name] = writer.op(f"grad.{name}", aten.mul.Tensor, param, value, numel=numel)
    optimizer = OptimizerInfo("sgd", "SGD", (OptimizerGroup(tuple(params), tuple(FLAGS.items())),))
    return writer.program(
        world, writer.run(value, tail), params=params, grads=grads, optimizer=optimizer if update else None
    )


Item = tuple[str, float]


def step_with_uses(world: cf.ClusterSpec, items: Sequence[Item], sizes: Sequence[int]) -> Program:
    """items: ("run", seconds), ("ready", m): all_reduce m may be sent from here on, ("need", m): its result is used."""
    writer = Writer()
    values = [writer.input("input", f"x{i}", numel) for i, numel in enumerate(sizes)]
    value = writer.input("input", "x", 1)
    waits: dict[int, fx.Node] = {}
    for kind, what in items:
        if kind == "run":
            value = writer.run(value, what)
            continue
        m = int(what)
        if kind == "ready":
            sent = writer.op(f"value.{m}", aten.mul.Tensor, values[m], value, numel=sizes[m])
            start = writer.op(f"start.{m}", c10d.all_reduce.default, sent, "sum", "dp", numel=sizes[m])
            info(start).collective = CollectiveInfo(
                "all_reduce", "dp", torch.float32, 4 * sizes[m], (f"p{m}",), m, "sum"
            )
            waits[m] = writer.op(f"wait.{m}", WAIT, start, numel=sizes[m])
        else:
            value = writer.op(f"use.{m}", aten.add.Tensor, value, writer.op(f"sum.{m}", aten.sum.default, waits[m]))
    return writer.program(world, value)


# Plans.


def seconds(program: Program) -> float:
    played = play(program, cost_model(program.config.cluster))
    return played.ended - played.began


def with_fusion(program: Program, fusion: Mapping[str, Any]) -> Program:
    """A copy that is to be fused in this mode."""
    config = CompileConfig.resolve({"comm_fusion": fusion, "cluster": program.config.cluster})
    return replace(program.copy(), config=config)


def planned(program: Program, fusion: Mapping[str, Any]) -> float:
    """Seconds of the step that the passes make of a program without moving its compute."""
    program = with_fusion(program, fusion)
    build_pipeline(Situation(program.config, program.mesh, variant=Variant.of(across_steps=False))).run(program)
    return seconds(program)


def compiled(program: Program, fusion: Mapping[str, Any]) -> float:
    """The same with all that `compile` tries."""
    program = with_fusion(program, fusion)
    return seconds(plan_step(program, program.config)[0])


def fastest_fixed(program: Program) -> float:
    """Seconds of the fastest plan with buckets of a fixed size. Where mode "optimal" makes the same, it is verified."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COMMFUSE_VERIFY")
        return min(compiled(program, each) for each in FIXED)


def with_buckets(program: Program, buckets: Partition) -> Program:
    """The step with these buckets, as far as they can be merged."""
    program = with_fusion(program, BY_ID)
    number = {f"p{m}": i for i, bucket in enumerate(buckets, start=1) for m in bucket}
    program.params = {name: replace(param, fusion_id=number[name]) for name, param in program.params.items()}
    for start in program.collectives():
        details = collective_of(start)
        info(start).collective = replace(details, fusion_id=number[details.members[0]])
    build_pipeline(Situation(program.config, program.mesh, variant=Variant.of(across_steps=False))).run(program)
    return program


def times(program: Program, count: int, wanted: Callable[[Partition], bool] = lambda plan: True) -> list[float]:
    """Seconds of every legal plan: buckets in the order of issue, each sent as soon as it is ready and its turn."""
    made: dict[frozenset[frozenset[int]], _Made] = {}
    found: list[float] = []
    for plan in filter(wanted, ordered_partitions(range(count))):
        key = frozenset(map(frozenset, plan))
        if key not in made:
            made[key] = _Made(with_buckets(program, sorted(plan)))
        found += made[key].in_order(plan)
    return found


class _Made:
    """A program with its buckets, which can be issued in several orders."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes = list(program.graph.nodes)
        self.place = {node: float(i) for i, node in enumerate(self.nodes)}
        self.before = Dependence(program.graph, program.aliases()).direct
        self.starts: dict[frozenset[int], fx.Node] = {}
        for start in program.collectives():
            details = collective_of(start)
            self.starts[frozenset(int(name[1:]) for name in details.members)] = start

    def in_order(self, plan: Partition) -> list[float]:
        """Seconds with this order of issue; nothing where that is impossible."""
        if any(frozenset(bucket) not in self.starts for bucket in plan):
            return []
        reorder(self.program.graph, self.nodes)
        place, before = dict(self.place), dict(self.before)
        order = [self.starts[frozenset(bucket)] for bucket in plan]
        for first, then in pairwise(order):
            before[then] = [*before[then], first]
            place[then] = max(place[then], place[first])
        try:
            stable_sort(self.program.graph, place, before)
        except AssertionError:  # a result is used before what has to be sent first is ready
            return []
        return [seconds(self.program)]


def ordered_partitions(members: Sequence[int]) -> Iterator[Partition]:
    """All partitions of the members, in all orders."""
    if not members:
        yield []
        return
    for mask in range(1, 1 << len(members)):
        first = [m for i, m in enumerate(members) if mask >> i & 1]
        for rest in ordered_partitions([m for i, m in enumerate(members) if not mask >> i & 1]):
            yield [first, *rest]


def of_neighbours(plan: Partition) -> bool:
    return [m for bucket in plan for m in bucket] == sorted(m for bucket in plan for m in bucket)


# Whole steps on one FIFO stream, with nothing shared.


def checked(examples: int) -> settings:
    """The same examples in every run, and none made smaller when they fail: each is many simulations."""
    return settings(max_examples=examples, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))


latencies = st.sampled_from([0.0, 1e-5, 1e-4, 1e-3])
lengths = st.sampled_from([0.0, 1e-4, 1e-3, 2e-3, 5e-3, 2e-2])
elements = st.builds(lambda n, unit: 16 * n * unit, st.integers(1, 60), st.sampled_from([1, 100, 1000, 10_000]))
gradient_lists = st.lists(st.tuples(lengths, elements), min_size=2, max_size=4)


@checked(40)
@example(4, 1e-4, [(1e-3, 16_000), (5e-3, 480_000), (0.0, 3200), (2e-3, 960_000), (1e-3, 16)], 0.0, True)
@given(st.sampled_from(ONE_LINE), latencies, gradient_lists, lengths, st.booleans())
def test_gradients_are_sent_as_well_as_in_any_plan(
    ranks: int, alpha: float, gradients: list[tuple[float, int]], tail: float, update: bool
) -> None:
    program = training_step(cluster(ranks, alpha), gradients, tail, update)
    every = times(program, len(gradients))
    assert len(every) == {2: 3, 3: 13, 4: 75, 5: 541}[len(gradients)]
    assert planned(program, OPTIMAL) == pytest.approx(min(every), rel=1e-9)


@checked(40)
@given(st.sampled_from(TWO_LINES), latencies, gradient_lists, lengths, st.booleans())
def test_with_two_algorithms_gradients_are_cut_as_well_as_any_neighbours(
    ranks: int, alpha: float, gradients: list[tuple[float, int]], tail: float, update: bool
) -> None:
    """The search is over buckets of neighbours. Others can be shorter here: bytes cost more in small messages."""
    program = training_step(cluster(ranks, alpha), gradients, tail, update)
    assert planned(program, OPTIMAL) == pytest.approx(min(times(program, len(gradients), of_neighbours)), rel=1e-9)


@st.composite
def steps_with_uses(draw: st.DrawFn) -> tuple[list[Item], list[int]]:
    sizes = draw(st.lists(elements, min_size=2, max_size=4))
    items: list[Item] = []
    coming, flying = list(range(len(sizes))), list[int]()
    while coming or flying:
        items.append(("run", draw(lengths)))
        if coming and (not flying or draw(st.booleans())):
            flying.append(coming.pop(0))
            items.append(("ready", flying[-1]))
        else:
            items.append(("need", flying.pop(draw(st.integers(0, len(flying) - 1)))))
    return [*items, ("run", draw(lengths))], sizes


@checked(40)
@given(st.sampled_from(ONE_LINE), latencies, steps_with_uses())
def test_results_used_on_the_way_are_sent_as_well_as_in_any_plan(
    ranks: int, alpha: float, step: tuple[list[Item], list[int]]
) -> None:
    items, sizes = step
    program = step_with_uses(cluster(ranks, alpha), items, sizes)
    assert planned(program, OPTIMAL) == pytest.approx(min(times(program, len(sizes))), rel=1e-9)


# Whole steps on cores that the backend and copies take a part of.

shared_clusters = st.builds(
    lambda ranks, alpha, bandwidth, host, op, message: cluster(
        ranks, alpha, bandwidth, host, memory_bandwidth=1e10, op_overhead=op, collective_overhead=message
    ),
    st.integers(2, 8),
    latencies,
    st.sampled_from([1e8, 1e9, 1e10]),
    st.sampled_from([0.0, 2e-10, 4.5e-10, 1e-9]),
    st.sampled_from([0.0, 4e-6]),
    st.sampled_from([0.0, 8e-5]),
)


@checked(24)
@given(shared_clusters, gradient_lists, lengths)
def test_no_fixed_plan_is_faster(world: cf.ClusterSpec, gradients: list[tuple[float, int]], tail: float) -> None:
    program = training_step(world, gradients, tail, update=True)
    assert compiled(program, OPTIMAL) <= fastest_fixed(program) * (1 + 1e-9)


@checked(24)
@given(shared_clusters, gradient_lists, lengths)
def test_no_fixed_plan_is_faster_by_much_without_an_update(
    world: cf.ClusterSpec, gradients: list[tuple[float, int]], tail: float
) -> None:
    """Gradients that are handed out are divided as they arrive: pieces and waits decide what that hides behind."""
    program = training_step(world, gradients, tail, update=False)
    assert compiled(program, OPTIMAL) <= fastest_fixed(program) * (1 + 1e-2)


# Many gradients, across steps.


def across_seconds(world: cf.ClusterSpec, width: int, layers: int, bias: bool = False) -> float:
    """Of a step across steps, with as many layers of this width."""
    options = {"comm_fusion": OPTIMAL, "cluster": world, "schedule": cf.ScheduleConfig(across_steps=True)}
    captured = chain((width,) * (layers + 1), batch=8, ranks=2, bias=bias)
    program = replace(captured.copy(), config=CompileConfig.resolve(options))
    return seconds(plan_step(program, program.config)[0])


def test_few_bytes_of_many_gradients_are_cut_into_halves_and_thirds(monkeypatch: pytest.MonkeyPatch) -> None:
    world = cluster(2, 1e-4, 5e7, op_overhead=2e-5)
    tried = across_seconds(world, 16, 30)
    monkeypatch.setattr(cyclic_buckets, "_merges", lambda sizes, total: sizes)
    assert tried < 0.97 * across_seconds(world, 16, 30)


def test_neighbouring_buckets_are_joined_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """One size for all of them is too large in one place, and too small in another."""
    world = cluster(2, 2e-4, 2e8, op_overhead=4e-5, collective_overhead=1.5e-4)
    tried = across_seconds(world, 96, 16, bias=True)
    monkeypatch.setattr(cyclic_buckets, "joined", lambda seconds, cuts, judged, moves: (seconds, cuts))
    assert tried < 0.965 * across_seconds(world, 96, 16, bias=True)


def test_buckets_for_the_end_of_the_step_are_tried_across_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones, of which stretches that are complete are sent before the rest."""
    world = cluster(2, 1e-4, 4e8, op_overhead=5e-5, collective_overhead=3e-4)
    tried = across_seconds(world, 256, 40)
    made = compile_call.variants

    def others(*args: Any) -> Variants:
        found = made(*args)
        return Variants(tuple(each for each in found.searched if not each.get("cut_within", False)), found.fixed)

    monkeypatch.setattr(compile_call, "variants", others)
    assert tried < 0.99 * across_seconds(world, 256, 40)
