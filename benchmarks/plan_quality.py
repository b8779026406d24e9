"""How good plans are: fusion and schedules of several kinds, played by one simulator at 8 to 4096 ranks.

Worlds are virtual: nothing is sent. Every plan, those of PyTorch's own graph passes included, is compiled from the
same captured step and played with the same costs.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import commfuse_fx as cf
from benchmarks.measure import save
from benchmarks.plan_workloads import PLAN_WORKLOADS, PlanWorkload
from benchmarks.torch_plans import (
    GivenOrder,
    TorchGraph,
    TorchPlan,
    bucket_all_reduces,
    fuse_ddp,
    is_partition,
    overlap_scheduling,
)
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.cost.model import CostModel
from commfuse_fx.ir.core.collectives import collective_of
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.meta import tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import Situation
from commfuse_fx.planning.compile_call import plan_step
from commfuse_fx.planning.pipeline.pipeline import PassPipeline
from commfuse_fx.planning.pipeline.recipe import build_pipeline
from commfuse_fx.simulate.simulation import Simulation, simulate

MIB = 1 << 20

WORLDS = {
    "h100-node": 8,
    "h100-ib-8": 64,
    "h100-ib-64": 512,
    "h100-ib-512": 4096,
    "gloo-1gbit": 8,
    "gloo-10gbit": 8,
}
"""Clusters, and the ranks that train on them."""

OPTIMAL = "optimal"
ACROSS = "optimal, across steps"
DDP = "DDP 25 MiB, first 1 MiB"

_BY_COST = {"allreduce": {"mode": "optimal", "config": None}}

# comm_fusion and schedule of the plans that need no more than options. 1 TiB holds any model.
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {"comm_fusion": {"openstate": False}},
    "one bucket": {"comm_fusion": {"allreduce": {"mode": "size", "config": 1 << 20}}},
    DDP: {},
    "64 MiB": {"comm_fusion": {"allreduce": {"mode": "auto", "config": None}}},
    OPTIMAL: {"comm_fusion": _BY_COST},
    ACROSS: {"comm_fusion": _BY_COST, "schedule": cf.ScheduleConfig(across_steps=True)},
}

TORCH = ("torch ddp_fusion", "torch bucketing", "torch overlap_scheduling")
PLANS = (*OPTIONS, *TORCH)

SAME = 1e-6
"""Relative difference up to which two simulated steps count as equally long."""

NEAR = 0.02
"""How far above its lower bound a step may be where compute suffices to hide its communication."""


@dataclass(frozen=True)
class Row:
    """One plan in one world; times in milliseconds.

    gap: how far the step is above its lower bound, 0.1 being 10 %. ratio: the step over that of the fastest plan.
    hideable: one message with all gradients would take no longer than the backward goes on after the first gradient.
    last_ms: what the gradients that are ready last take on the wire, with nothing left to hide behind in this step.
    reason: why there is no such plan; then the figures are 0.
    """

    workload: str
    world: str
    ranks: int
    plan: str
    collectives: int = 0
    step_ms: float = 0.0
    exposed_ms: float = 0.0
    bound_ms: float = 0.0
    bound_by: str = ""
    gap: float = 0.0
    ratio: float = 0.0
    hideable: bool = False
    last_ms: float = 0.0
    reason: str = ""


class Case:
    """One workload, traced once, from which every plan is compiled."""

    def __init__(self, workload: PlanWorkload) -> None:
        self.name = workload.name
        model = workload.model()
        step = cf.compile(
            model, loss_fn=workload.loss_fn, optimizer=torch.optim.AdamW(model.parameters()), device_num=8
        )
        args, kwargs = workload.batch()
        captured = step.planner.read(step.planner.take_apart(args, kwargs)).captured
        assert captured is not None
        self.captured = captured
        self._torch: dict[str, TorchPlan] = {}
        self._graphs: dict[bool, TorchGraph] = {}
        self._unfused: tuple[str, Program] | None = None

    def program(self, world: str, ranks: int, plan: str) -> tuple[Program, PassPipeline]:
        """The captured step for this world, and the passes of this plan."""
        options = OPTIONS.get(plan, {})
        config = CompileConfig.resolve({**options, "device_num": ranks, "cluster": world})
        mesh, params = Mesh.of_sizes((ranks,)), dict(self.captured.params)
        program = replace(self.captured.copy(), mesh=mesh, config=config, params=params)
        return program, build_pipeline(Situation(config, mesh))

    def unfused(self, world: str, ranks: int) -> Program:
        """The step as it is when its collectives are about to be merged; the one of the last world is kept."""
        if self._unfused is not None and self._unfused[0] == world:
            return self._unfused[1]
        program, pipeline = self.program(world, ranks, "none")
        names = [each.name for each in pipeline.passes]
        pipeline.run(program, part=slice(names.index("fuse_collectives")))
        self._unfused = (world, program)
        return program

    def compiled(self, world: str, ranks: int, plan: str) -> Program:
        """The final program. Raises _NoPlanError when PyTorch's pass gives none."""
        program, pipeline = self.program(world, ranks, plan)
        if "optimal" in plan:
            return plan_step(program, program.config)[0]
        if plan == DDP:
            _fuse(program, ddp_buckets(self.unfused(world, ranks)))
        elif plan in TORCH:
            given = self.torch_plan(world, ranks, plan)
            if given.reason:
                raise _NoPlanError(given.reason)
            _fuse(program, given.buckets)
            passes = [GivenOrder(given) if each.name == "schedule" else each for each in pipeline.passes]
            pipeline = replace(pipeline, passes=tuple(passes))
        pipeline.run(program)
        return program

    def torch_plan(self, world: str, ranks: int, plan: str) -> TorchPlan:
        """The plan of one of PyTorch's passes. Only overlap_scheduling asks for costs; the others see one world."""
        key = plan if plan != TORCH[2] else f"{plan} {world}"
        if key not in self._torch:
            unfused = self.unfused(world, ranks)
            divided = plan == TORCH[0]
            if divided not in self._graphs:
                self._graphs[divided] = TorchGraph(unfused, divided=divided)
            by_cost = overlap_scheduling(unfused, CostModel(unfused.config.cluster))
            transform = {TORCH[0]: fuse_ddp, TORCH[1]: bucket_all_reduces, TORCH[2]: by_cost}[plan]
            found = self._graphs[divided].plan(transform, ranks)
            if not found.reason and not is_partition(found, unfused):
                found = TorchPlan(reason="its buckets are no partition of the gradients")
            self._torch[key] = found
        return self._torch[key]


class _NoPlanError(Exception):
    pass


def ddp_buckets(unfused: Program) -> tuple[tuple[str, ...], ...]:
    """Names of the parameters of each bucket as DistributedDataParallel forms them: in the order in which gradients are
    ready, a bucket closes as soon as it has 25 MiB, the first one as soon as it has 1 MiB."""
    buckets: list[tuple[str, ...]] = []
    filling: dict[Any, tuple[list[str], int, bool]] = {}  # by dtype and device: names, bytes, whether it is the first
    for start in unfused.collectives():
        details = collective_of(start)
        key = (details.kind, details.group, details.dtype, tensor_spec(start).device)
        names, nbytes, first = filling.get(key, ([], 0, True))
        names, nbytes = [*names, *details.members], nbytes + details.nbytes
        if nbytes >= (MIB if first else 25 * MIB):
            buckets.append(tuple(names))
            names, nbytes, first = [], 0, False
        filling[key] = (names, nbytes, first)
    buckets.extend(tuple(names) for names, _, _ in filling.values() if names)
    return tuple(buckets)


def _fuse(program: Program, buckets: Iterable[Sequence[str]]) -> None:
    """Give the parameters of each bucket one fusion id, as `param.comm_fusion` does."""
    for number, names in enumerate(buckets, start=1):
        for name in names:
            program.params[name] = replace(program.params[name], fusion_id=number)


def hideable(unfused: Program, costs: CostModel) -> bool:
    """Whether all gradients, in one message per key, fit into what is computed between the first and the last."""
    starts = list(unfused.collectives())
    nodes = list(unfused.graph.nodes)
    between = [node for node in nodes[nodes.index(starts[0]) : nodes.index(starts[-1])] if node not in starts]
    return _wire_seconds(unfused, costs, starts) <= sum(costs.compute_seconds(node) for node in between)


def last_seconds(unfused: Program, costs: CostModel) -> float:
    """Seconds on the wire of the gradients behind which the backward computes nothing more, in one message per key."""
    starts = list(unfused.collectives())
    last: list[torch.fx.Node] = []
    for node in reversed(unfused.graph.nodes):
        if node in starts:
            last.append(node)
        elif last and costs.compute_seconds(node):  # starts cost compute too, but are not compute
            break
    return _wire_seconds(unfused, costs, last)


def _wire_seconds(program: Program, costs: CostModel, starts: Iterable[torch.fx.Node]) -> float:
    sizes: dict[Any, tuple[torch.fx.Node, int]] = {}
    for start in starts:
        details = collective_of(start)
        key = (details.kind, details.group, details.dtype)
        sizes[key] = (start, sizes.get(key, (start, 0))[1] + details.nbytes)
    return sum(costs.cost_of(start, nbytes, mesh=program.mesh).seconds for start, nbytes in sizes.values())


def evaluate(case: Case, worlds: Iterable[str], plans: Iterable[str]) -> Iterator[list[Row]]:
    """The rows of each world, ratios filled in."""
    chosen = tuple(plans)
    for world in worlds:
        ranks = WORLDS[world]
        unfused = case.unfused(world, ranks)
        costs = CostModel(unfused.config.cluster)
        fits, last = hideable(unfused, costs), last_seconds(unfused, costs)
        rows = []
        for plan in chosen:
            row = Row(case.name, world, ranks, plan, hideable=fits, last_ms=last * 1e3)
            try:
                rows.append(_filled(row, simulate(case.compiled(world, ranks, plan), costs)))
            except _NoPlanError as error:
                rows.append(replace(row, reason=str(error)))
        best = min(row.step_ms for row in rows if not row.reason)
        yield [row if row.reason else replace(row, ratio=row.step_ms / best) for row in rows]


def _filled(row: Row, played: Simulation) -> Row:
    return replace(
        row,
        collectives=len(played.collectives),
        step_ms=played.step_seconds * 1e3,
        exposed_ms=played.exposed_seconds * 1e3,
        bound_ms=played.bound_seconds * 1e3,
        bound_by=played.bound_by,
        gap=played.gap,
    )


def beaten(rows: Sequence[Row]) -> list[str]:
    """Where the best plan is not the one that claims to be: a line for each plan that is faster than it.

    "optimal" is compared with all plans that end with their step, "optimal, across steps" with all.
    """
    found: list[str] = []
    for subject in rows:
        if subject.plan not in (OPTIMAL, ACROSS) or subject.reason:
            continue
        for other in rows:
            same_case = (other.workload, other.world) == (subject.workload, subject.world)
            if not same_case or other.reason or (other.plan == ACROSS and subject.plan == OPTIMAL):
                continue
            if other.step_ms < subject.step_ms * (1 - SAME):
                found.append(
                    f"{subject.workload}, {subject.world}: {subject.plan} {subject.step_ms:.4f} ms is above "
                    f"{other.plan} {other.step_ms:.4f} ms ({subject.step_ms / other.step_ms - 1:.2%})"
                )
    return found


def far_from_bound(rows: Iterable[Row]) -> list[str]:
    """Where compute suffices to hide everything, and our best plan is more than `NEAR` above its lower bound."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row.plan in (OPTIMAL, ACROSS) and row.hideable and not row.reason:
            key = (row.workload, row.world)
            if key not in best or row.step_ms < best[key].step_ms:
                best[key] = row
    return [
        f"{row.workload}, {row.world}: {row.plan} is {row.gap:.2%} above its bound; the last gradients alone take "
        f"{row.last_ms:.4f} ms on the wire, {row.last_ms / row.bound_ms:.2%} of the bound"
        for row in best.values()
        if row.gap > NEAR
    ]


def table(rows: Sequence[Row]) -> str:
    """One line per plan."""
    lines = [
        f"{'workload':10} {'world':11} {'ranks':>5} {'plan':24} {'coll.':>5} {'step ms':>11} {'exposed ms':>11} "
        f"{'bound ms':>11} {'gap':>7} {'to best':>8}"
    ]
    for row in rows:
        head = f"{row.workload:10} {row.world:11} {row.ranks:5} {row.plan:24}"
        if row.reason:
            lines.append(f"{head} not run: {row.reason}")
            continue
        lines.append(
            f"{head} {row.collectives:5} {row.step_ms:11.3f} {row.exposed_ms:11.3f} {row.bound_ms:11.3f} "
            f"{row.gap:7.1%} {row.ratio:8.4f}"
        )
    return "\n".join(lines)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """workloads, worlds, plans: names; all by default."""
    parser = argparse.ArgumentParser(prog="benchmarks plan_quality", description=__doc__)
    for name, known in (("workloads", PLAN_WORKLOADS), ("worlds", WORLDS), ("plans", PLANS)):
        choices = list(known)
        parser.add_argument(f"--{name}", nargs="+", choices=choices, default=choices, metavar=name[:-1].upper())
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 when a plan is faster than the one that is to be optimal."""
    options = parse(arguments)
    rows: list[Row] = []
    for name in options.workloads:
        case = Case(PLAN_WORKLOADS[name])
        gc.collect()
        gc.freeze()  # the traced step stays; looking through it again and again would take a third of the time
        for of_world in evaluate(case, options.worlds, options.plans):
            rows.extend(of_world)
            text = table(of_world)
            print(text if len(rows) == len(of_world) else text.split("\n", 1)[1], flush=True)
    worse, far = beaten(rows), far_from_bound(rows)
    print(f"\noptimal is never worse than any other plan: {str(not worse).lower()}")
    print("".join(f"  {line}\n" for line in worse), end="")
    print(f"within {NEAR:.0%} of the bound wherever compute suffices to hide: {str(not far).lower()}")
    print("".join(f"  {line}\n" for line in far), end="")
    path = save(
        "plan_quality",
        {
            "rows": [asdict(row) for row in rows],
            "optimal_never_worse": not worse,
            "worse": worse,
            "near_bound_where_hideable": not far,
            "far": far,
        },
    )
    print(f"written to {path}")
    return int(bool(worse))
