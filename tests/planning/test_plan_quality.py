from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks import plan_quality
from benchmarks.plan_quality import ACROSS, DDP, OPTIMAL, PLANS, TORCH, WORLDS, Case, Row
from benchmarks.plan_workloads import PLAN_WORKLOADS, EqualLayers, PlanWorkload, ResNet
from benchmarks.torch_plans import TorchGraph, TorchPlan, fuse_ddp, is_partition
from commfuse_fx.cost.model import CostModel
from commfuse_fx.ir.core.collectives import is_start
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.verify import verify

FIXED = ("none", "one bucket", DDP, "64 MiB")


def workload(model: Callable[[], nn.Module], *shape: int) -> PlanWorkload:
    target = torch.zeros(shape[0], dtype=torch.long)
    return PlanWorkload("small", model, lambda: ((torch.zeros(shape), target), {}))


SMALL = {
    "mlp": workload(lambda: EqualLayers(256, 10), 64, 256),
    "resnet": workload(lambda: ResNet(16, 1), 4, 3, 16, 16),
}


@pytest.fixture(scope="module", params=list(SMALL))
def case(request: pytest.FixtureRequest) -> Case:
    return Case(SMALL[request.param])


def members(case: Case, world: str, plan: str) -> list[tuple[str, ...]]:
    program = case.compiled(world, WORLDS[world], plan)
    found = [info(start).collective for start in program.collectives()]
    return [each.members for each in found if each is not None]


def test_optimal_is_never_worse_than_fixed_thresholds(case: Case) -> None:
    for rows in plan_quality.evaluate(case, ("gloo-1gbit", "h100-ib-8"), (*FIXED, OPTIMAL)):
        assert [row.plan for row in rows] == [*FIXED, OPTIMAL]
        assert all(row.step_ms >= row.bound_ms * (1 - 1e-9) > 0 for row in rows)
        assert min(row.ratio for row in rows) == 1.0
        assert plan_quality.beaten(rows) == []


def test_torch_plans_are_partitions_that_the_simulator_can_play(case: Case) -> None:
    unfused = case.unfused("h100-node", 8)
    for plan in TORCH:
        given = case.torch_plan("h100-node", 8, plan)
        assert given.reason == ""
        assert is_partition(given, unfused)
        assert sorted(map(sorted, members(case, "h100-node", plan))) == sorted(map(sorted, given.buckets))
        verify(case.compiled("h100-node", 8, plan), plan)


def test_torch_orders_are_kept() -> None:
    case = Case(SMALL["mlp"])
    given = case.torch_plan("gloo-1gbit", 8, TORCH[2])
    program = case.compiled("gloo-1gbit", 8, TORCH[2])
    nodes = list(program.graph.nodes)
    wanted = [set(given.buckets[entry[1]]) for entry in given.order if entry[0] == "start"]
    assert [set(bucket) for bucket in members(case, "gloo-1gbit", TORCH[2])] == wanted
    first = next(i for i, node in enumerate(nodes) if is_start(node))
    assert any(info(node).phase == "backward" and node.op == "call_function" for node in nodes[first + 1 :])


def test_a_torch_pass_that_fails_is_a_plan_with_a_reason() -> None:
    case = Case(SMALL["mlp"])
    graph = TorchGraph(case.unfused("h100-node", 8), divided=False)

    def fails(module: torch.fx.GraphModule) -> None:
        raise KeyError("triton")

    assert graph.plan(fails) == TorchPlan(reason="KeyError: 'triton'")
    # Gradients that are not divided are none of DistributedDataParallel: all stay alone.
    assert all(len(bucket) == 1 for bucket in graph.plan(fuse_ddp).buckets)


def test_ddp_buckets_close_at_one_and_then_at_25_mebibytes() -> None:
    # Layers of 4 MiB of weights and 4 KiB of biases; the bias is ready first.
    case = Case(workload(lambda: EqualLayers(1024, 8), 4, 1024))
    unfused = case.unfused("gloo-1gbit", 8)
    sizes = {
        name: each.nbytes
        for start in unfused.collectives()
        if (each := info(start).collective)
        for name in each.members
    }
    buckets = plan_quality.ddp_buckets(unfused)
    filled = [sum(sizes[name] for name in bucket) for bucket in buckets]
    assert filled[0] >= 1 << 20 > filled[0] - sizes[buckets[0][-1]]
    assert filled[1] >= 25 << 20 > filled[1] - sizes[buckets[1][-1]]
    assert sum(filled) == sum(sizes.values())
    assert [set(bucket) for bucket in members(case, "gloo-1gbit", DDP)] == [set(bucket) for bucket in buckets]


def test_one_captured_step_serves_all_plans() -> None:
    """What one plan says of parameters must not leak into the next."""
    case = Case(SMALL["mlp"])
    before = members(case, "h100-node", "none")
    members(case, "h100-node", DDP)
    assert members(case, "h100-node", "none") == before
    assert all(param.fusion_id is None for param in case.captured.params.values())


def test_what_can_be_hidden() -> None:
    case = Case(workload(lambda: EqualLayers(256, 10), 4096, 256))
    unfused = case.unfused("h100-node", 8)
    assert plan_quality.hideable(unfused, CostModel(unfused.config.cluster))
    slow = case.unfused("gloo-1gbit", 8)
    costs = CostModel(slow.config.cluster)
    *_, last = slow.collectives()
    assert not plan_quality.hideable(
        Case(workload(lambda: EqualLayers(256, 10), 16, 256)).unfused("gloo-1gbit", 8), costs
    )
    assert plan_quality.last_seconds(slow, costs) >= costs.cost_of(last, mesh=slow.mesh).seconds > 0


def row(plan: str, step_ms: float, world: str = "h100-node", **changes: object) -> Row:
    return Row("mlp", world, 8, plan, 1, step_ms, **changes)  # type: ignore[arg-type]


def test_summary_names_the_plans_that_are_faster() -> None:
    rows = [row("none", 2.0), row(OPTIMAL, 1.0), row(ACROSS, 0.9), row("64 MiB", 0.5, "gloo-1gbit")]
    assert plan_quality.beaten(rows) == []
    assert plan_quality.beaten([*rows, row("torch bucketing", 0.95)]) == [
        "mlp, h100-node: optimal 1.0000 ms is above torch bucketing 0.9500 ms (5.26%)"
    ]
    assert len(plan_quality.beaten([*rows, row("64 MiB", 0.8)])) == 2
    assert plan_quality.beaten([*rows, row("64 MiB", 0.0, reason="it needs a GPU")]) == []
    assert len(plan_quality.beaten([row(OPTIMAL, 1.0), row(ACROSS, 1.1)])) == 1


def test_summary_names_what_is_far_from_its_bound() -> None:
    far = row(OPTIMAL, 1.1, bound_ms=1.0, gap=0.1, last_ms=0.1)
    assert plan_quality.far_from_bound([far]) == []
    hideable = row(OPTIMAL, 1.1, bound_ms=1.0, gap=0.1, last_ms=0.1, hideable=True)
    assert len(plan_quality.far_from_bound([hideable])) == 1
    across = row(ACROSS, 1.01, bound_ms=1.0, gap=0.01, hideable=True)
    assert plan_quality.far_from_bound([hideable, across]) == []


def test_table_shows_every_plan_and_why_one_is_missing() -> None:
    lines = plan_quality.table([row("none", 2.0), row(TORCH[2], 0.0, reason="it needs a GPU")]).splitlines()
    assert len(lines) == 3
    assert "2.000" in lines[1]
    assert lines[2].endswith("not run: it needs a GPU")


def test_arguments() -> None:
    options = plan_quality.parse([])
    assert options.workloads == list(PLAN_WORKLOADS)
    assert options.worlds == list(WORLDS)
    assert options.plans == list(PLANS)
    chosen = plan_quality.parse(["--worlds", "gloo-1gbit", "h100-ib-512", "--plans", OPTIMAL, "none"])
    assert chosen.worlds == ["gloo-1gbit", "h100-ib-512"]
    assert chosen.plans == [OPTIMAL, "none"]
    for wrong in (["--worlds", "moon"], ["--workloads"], ["--plan", "best"]):
        with pytest.raises(SystemExit):
            plan_quality.parse(wrong)
