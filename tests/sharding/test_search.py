"""parallel_mode="auto": what is found computes what one device does, and is what people would have chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.cost.roofline import roofline_seconds
from commfuse_fx.ir.core.meta import TensorSpec, info
from commfuse_fx.ir.core.placement import P, R, S
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.machine.presets import resolve_cluster
from commfuse_fx.sharding.dividing.axis import Axis, Pin
from commfuse_fx.sharding.dividing.choose_strategy import Chooser
from commfuse_fx.sharding.dividing.divided_value import Value
from commfuse_fx.sharding.rules.writing.call import Strategy
from commfuse_fx.sharding.search import searched
from commfuse_fx.sharding.search.axis_grid import AxisGrid, LaidOut
from commfuse_fx.sharding.search.exposure import GRADIENT
from commfuse_fx.sharding.search.grids import grids
from commfuse_fx.sharding.search.layout_problem import LayoutProblem
from commfuse_fx.sharding.search.placement_costs import PlacementCosts
from commfuse_fx.sharding.search.priced_reads import KnownLayouts, LayoutRead, LayoutReader, price_read
from commfuse_fx.solvers.strategies import cost_tables
from commfuse_fx.solvers.strategies.cheapest_choice import cheapest_choice
from tests.models import CONV, MLP_CASE, SHARED, TIED, Case
from tests.sharding.divided_oracle import compare
from tests.solvers.integer_program import by_integer_program
from tests.undrawn import undrawn

Model = Callable[[], nn.Module]


def slow_device(name: str, flops: float, bandwidth: float) -> ClusterSpec:
    """A preset with a device on which small models take long, and no overhead of ops: dividing them pays."""
    cluster = resolve_cluster(name)
    rates = {dtype: rate * flops for dtype, rate in cluster.device.flops.items()}
    device = replace(
        cluster.device, op_overhead=0.0, flops=rates, memory_bandwidth=cluster.device.memory_bandwidth * bandwidth
    )
    return replace(cluster, device=device)


SLOW_FLOPS = slow_device("h100-node", 1e-6, 1.0)
SLOW_MEMORY = slow_device("h100-node", 1.0, 1e-5)


@pytest.mark.parametrize("cluster", [SLOW_FLOPS, SLOW_MEMORY], ids=["slow flops", "slow memory"])
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("case", [MLP_CASE, CONV, SHARED, TIED], ids=lambda case: case.name)
def test_equals_one_device(case: Case, mesh: tuple[int, ...], cluster: ClusterSpec) -> None:
    found = compare(case, mesh, parallel_mode="auto", cluster=cluster, gradients=False)
    assert [note for note in found.program.notes if note.topic == "search"] or not found.layouts()


def test_parts_of_the_batch_are_handed_over() -> None:
    compare(MLP_CASE, (4,), parallel_mode="auto", cluster=SLOW_MEMORY, ways=4, gradients=False)


def mlp(width: int, layers: int) -> nn.Module:
    """Layers of a step that does not run."""
    pairs = ((nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(layers))
    return undrawn(lambda: nn.Sequential(*(layer for pair in pairs for layer in pair)))


def tokens_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def lowered(model: nn.Module, loss_fn: Any, x: torch.Tensor, y: torch.Tensor, **options: Any) -> Any:
    options = {"parallel_mode": "auto", "device_num": 8, "cluster": "h100-node", **options}
    optimizer = torch.optim.AdamW(model.parameters())
    return cf.compile(model, loss_fn=loss_fn, optimizer=optimizer, **options).lower(x, y)


def layouts(found: Any) -> Mapping[str, str]:
    return {
        name: ", ".join(f"{placement} on {group}" for group, placement in param.layout)
        for name, param in found.program.params.items()
        if param.layout
    }


def test_a_large_batch_is_divided_and_the_model_is_not() -> None:
    x = torch.empty(65536, 64)
    found = lowered(mlp(64, 2), F.mse_loss, x, x)
    assert layouts(found) == {}
    assert [each.kind for each in found.collectives] == ["all_reduce", "all_reduce"]
    assert f"R, as nothing asks for parts of them: {', '.join(found.program.params)}\n" in found.explain().text()


def test_a_schedule_that_is_tried_leaves_strategies_to_the_given_cluster() -> None:
    """They stay, whatever is measured later. The default cluster is another one."""
    x = torch.empty(8, 64)
    given, other = (
        lowered(mlp(64, 1), F.mse_loss, x, x, cluster="h100-node", schedule=each) for each in ("overlap", "auto")
    )
    assert other.program.search_seconds == given.program.search_seconds and layouts(other) == layouts(given)


@pytest.mark.parametrize("cluster", ["h100-node", "gloo-1gbit"])
def test_wide_layers_are_divided_by_columns_and_then_by_rows(cluster: str) -> None:
    x = torch.empty(8, 2048)
    found = lowered(mlp(2048, 1), F.mse_loss, x, x, cluster=cluster)
    assert layouts(found) == {"0.weight": "S(0) on dp", "0.bias": "S(0) on dp", "2.weight": "S(1) on dp"}


class Words(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.embed(tokens))
        return scores


def test_a_large_vocabulary_is_divided() -> None:
    tokens = torch.randint(0, 32000, (2, 16))
    found = lowered(Words(32000, 512), tokens_loss, tokens, tokens, mesh=(8,))
    assert layouts(found)["head.weight"] == "S(0) on dp" and "embed.weight" in layouts(found)
    scores = 2 * 16 * 8 * 32000 * 4
    assert all(each.bytes < scores / 50 for each in found.collectives)  # they are never brought together


def test_next_to_no_bandwidth_avoids_communication() -> None:
    cluster = resolve_cluster("gloo-1gbit")
    level = cluster.levels[0]
    slow = replace(cluster, levels=(replace(level, bandwidth=level.bandwidth / 1000, alpha=level.alpha * 1000),))
    x = torch.empty(8, 64)
    found = lowered(mlp(64, 2), F.mse_loss, x, x, cluster=slow)
    assert sum(each.bytes for each in found.collectives) <= 2 * 8 * x.nbytes  # the batch, which everybody computes


def test_more_bandwidth_takes_no_longer() -> None:
    """Whole plans, as they are simulated."""
    cluster, x = resolve_cluster("gloo-1gbit"), torch.empty(128, 256)
    seconds = []
    for times in (0.25, 1, 4, 16, 64):
        levels = tuple(replace(level, bandwidth=times * level.bandwidth) for level in cluster.levels)
        found = lowered(mlp(256, 2), F.mse_loss, x, x, mesh=(8,), cluster=replace(cluster, levels=levels))
        seconds.append(found.simulate().step_seconds)
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(seconds))


@pytest.mark.parametrize("cluster", ["h100-node", "gloo-10gbit"])
@pytest.mark.parametrize(("rows", "width"), [(4096, 64), (64, 512), (8, 1024)])
def test_no_strategy_is_worse_than_data_parallel(rows: int, width: int, cluster: str) -> None:
    x = torch.empty(rows, width)
    found, plain = (
        lowered(mlp(width, 1), F.mse_loss, x, x, cluster=cluster, parallel_mode=mode) for mode in ("auto", "semi_auto")
    )
    assert found.simulate().step_seconds <= plain.simulate().step_seconds * (1 + 1e-9)


# The problem and its solution


def caught(model: nn.Module, x: torch.Tensor, y: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program of a step, before it is divided, and the axis."""
    found: list[Any] = []

    def note(program: Any, axes: list[Axis], *rest: Any) -> list[Axis]:
        found.append((program.copy(), axes[0]))
        return axes

    monkeypatch.setattr(searched, "searched", note)
    lowered(model, F.mse_loss, x, y, device_num=2)
    return found[0]


@pytest.mark.parametrize("name", ["h100-node", "gloo-1gbit"])
def test_brute_force(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(4, 4)
    program, axis = caught(nn.Linear(4, 2, bias=False), x, torch.empty(4, 2), monkeypatch)
    cluster = slow_device(name, 1e-9, 1e-6)
    problem = LayoutProblem(program, [axis], [PlacementCosts(cluster, (0, 1))], cluster.device)
    graph = problem.graph
    assert 4 < len(graph.unary) < 30
    monkeypatch.setattr(cost_tables, "FEW", 0)
    pairs = cost_tables.CostTables(graph)
    best = branch_and_bound(pairs.unary, pairs.together)
    assert cheapest_choice(graph).cost == pytest.approx(best)


def branch_and_bound(unary: Any, pairs: Any) -> float:
    """The least cost, by looking at all choices that can still be the best."""
    before: list[list[tuple[int, Any]]] = [[] for _ in unary]
    for (one, other), table in pairs.items():
        before[other].append((one, table))
    best, states = inf, [0] * len(unary)

    def look(number: int, cost: float) -> None:
        nonlocal best
        if cost >= best:
            return
        if number == len(unary):
            best = cost
            return
        for state in range(len(unary[number])):
            states[number] = state
            more = sum(float(table[states[one], state]) for one, table in before[number])
            look(number + 1, cost + float(unary[number][state]) + more)

    look(0, 0.0)
    return best


class Readers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x) for layer in self.layers], 1)


def test_a_value_that_several_ops_need_is_gathered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = resolve_cluster("gloo-1gbit")
    free = replace(cluster.device, op_overhead=0.0, memory_bandwidth=1e30, flops={"f32": 1e30})
    costs = []
    for count in (2, 4):
        program, axis = caught(Readers(count), torch.empty(4, 4), torch.empty(4, count, 4), monkeypatch)
        weights = {f"layers.{number}.weight": Pin(S(0), "test") for number in range(count)}
        prices = PlacementCosts(replace(cluster, device=free), (0, 1))
        problem = LayoutProblem(program, [replace(axis, parameters=weights)], [prices], free)
        costs.append(cheapest_choice(problem.graph).cost)
    alpha = cluster.levels[0].alpha  # what one more message takes
    assert alpha < costs[0] <= costs[1] < costs[0] + alpha / 10


def test_searches_share_what_does_not_depend_on_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(8, 16)
    program, axis = caught(mlp(16, 2), x, x, monkeypatch)
    cluster, known = resolve_cluster("h100-node"), KnownLayouts()

    def problem(exposed: float, *shared: KnownLayouts) -> LayoutProblem:
        prices = PlacementCosts(cluster, (0, 1), {GRADIENT: exposed})
        return LayoutProblem(program, [axis], [prices], cluster.device, *shared)

    problem(1.0, known)
    alone = problem(0.3)
    calls, reads = len(known.calls), len(known.reads)
    assert reads < len(alone._reads)  # layers that are alike are priced once
    shared = problem(0.3, known)
    assert len(known.calls) == calls and len(known.reads) - reads == 4  # gradients of two weights and two biases
    for one, other in zip(alone.graph.unary, shared.graph.unary, strict=True):
        assert (one == other).all()
    assert alone.graph.pairs.keys() == shared.graph.pairs.keys()
    assert all((table == shared.graph.pairs[pair]).all() for pair, table in alone.graph.pairs.items())


def test_whole_ops_take_what_the_roofline_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the kernels that an op launches count too, of which a mask of dropout has many."""
    x = torch.empty(8, 16)
    program, axis = caught(nn.Sequential(mlp(16, 1), nn.Dropout(0.1)), x, x, monkeypatch)
    device = resolve_cluster("h100-node").device
    for node in program.graph.nodes:
        if isinstance(info(node).spec, TensorSpec):
            info(node).spec = replace(info(node).spec, device="cuda")
    grid = AxisGrid([axis], [PlacementCosts(resolve_cluster("h100-node"), (0, 1))], device)
    chooser = Chooser({node: Value(info(node).spec) for node in program.graph.nodes}, axis.ways)
    seconds = []
    for node in program.graph.nodes:
        if getattr(node.target, "commfuse_inner", None) is None:
            continue
        call = chooser.describe(node).call
        whole = Strategy((R,) * len(call.outputs), (R,) * len(call.inputs))
        seconds.append(grid.seconds_of(node, call, [whole]))
        assert seconds[-1] == roofline_seconds(node, device)
    assert seconds and min(seconds) > 10 * device.op_overhead


HASHED = """
import torch
from torch import nn
import commfuse_fx as cf
found = []
model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
optimizer = torch.optim.AdamW(model.parameters())
options = {"parallel_mode": "auto", "device_num": 4, "cluster": "h100-node"}
x = torch.empty(8, 512)
for mesh in (None, (2, 2)):
    for mode in ("dynamic_programming", "recursive_programming"):
        step = cf.compile(model, loss_fn=nn.MSELoss(), optimizer=optimizer, search_mode=mode, mesh=mesh, **options)
        found.append(step.lower(x, x).fingerprint)
cf.shard(model, "2", weight=(None, "tp"))
options["search_mode"] = "sharding_propagation"
step = cf.compile(model, loss_fn=nn.MSELoss(), optimizer=optimizer, mesh=(2, 2), **options)
found.append(step.lower(x, x).fingerprint)
"""


def test_plans_do_not_depend_on_hashes_or_threads() -> None:
    """Those of this process, which computes with one thread, and of another one."""
    own: dict[str, Any] = {}
    exec(HASHED, own)
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    other = subprocess.run(
        [sys.executable, "-c", f"{HASHED}print(hash('seed'), *found)"],
        env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    hashed, *found = other.stdout.split()
    assert int(hashed) != hash("seed") and found == own["found"] and len(found) == 5


def test_numpy_is_needed_for_a_search_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "commfuse_fx.sharding.search.searched", None)
    x = torch.empty(8, 16)
    with pytest.raises(cf.CommFuseError, match=r"pip install 'commfuse-fx\[auto\]'"):
        lowered(mlp(16, 1), F.mse_loss, x, x)
    lowered(mlp(16, 1), F.mse_loss, x, x, parallel_mode="semi_auto")


@pytest.mark.parametrize("count", [1, 2])
def test_a_partial_sum_of_several_ops_is_summed_before_them(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = resolve_cluster("h100-node")
    grid = AxisGrid([Axis("dp", 2)], [PlacementCosts(cluster, (0, 1))], cluster.device)
    known = KnownLayouts()
    states = known.states([LaidOut(((P,),), ()), LaidOut(((R,),), ())])
    needs = known.columns(states, "outputs", (0,))
    readers = [LayoutReader(number, needs, "forward") for number in range(count)]
    read = LayoutRead(0, 0, TensorSpec((4, 4), torch.float32, (4, 1), "cpu"), readers)
    for own in price_read(read, needs, grid, known).own:
        assert (own[0, 0] == inf) == (count > 1) and own[1, 1] == 0


def test_a_strategy_that_the_inputs_cannot_have_is_not_taken(tmp_path: Path) -> None:
    """As in a file that somebody has changed."""
    file = tmp_path / "strategies.json"
    x = torch.empty(8, 1024)
    lowered(mlp(1024, 1), F.mse_loss, x, x, mesh=(8,), strategy_ckpt_save_file=file)
    text = file.read_text()
    assert '"1/relu.0": "dp: S(1) -> S(1)"' in text and '"2/addmm.0": "dp: R, S(1), S(0) -> P"' in text
    file.write_text(text.replace('"dp: R, S(1), S(0) -> P"', '"dp: P, P, R -> P"'))
    lowered(mlp(1024, 1), F.mse_loss, x, x, mesh=(8,), strategy_ckpt_load_file=file)


@pytest.mark.parametrize(
    ("ranks", "near", "sizes"),
    [
        (8, 1, []),
        (8, 8, []),
        (12, 8, []),
        (16, 8, [(2, 8), (4, 4), (8, 2)]),
        (64, 8, [(8, 8), (16, 4), (32, 2)]),
        (144, 72, [(2, 72), (4, 36), (8, 18)]),
        (12, 3, [(4, 3)]),
    ],
)
def test_grids_of_a_free_mesh(ranks: int, near: int, sizes: list[tuple[int, int]]) -> None:
    assert grids(ranks, near) == sizes


# Several axes together


@pytest.mark.parametrize("name", ["h100-node", "gloo-1gbit"])
@pytest.mark.parametrize("model", [nn.Linear(8, 4, bias=False), mlp(16, 1)], ids=["one layer", "two layers"])
def test_two_axes_together_equal_the_integer_program(
    model: nn.Module, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = next(model.parameters()).shape[1]
    x, y = torch.empty(8, width), torch.empty(8, 4 if width == 8 else width)
    program, axis = caught(model, x, y, monkeypatch)
    axes = [replace(axis, group="a", ways=2), replace(axis, group="b", ways=2)]
    cluster = slow_device(name, 1e-9, 1e-6)
    prices = [PlacementCosts(cluster, (0, 2)), PlacementCosts(cluster, (0, 1))]
    problem = LayoutProblem(program, axes, prices, cluster.device)
    best = by_integer_program(problem.graph).cost
    found = cheapest_choice(problem.graph, problem.parts)
    assert found.cost == pytest.approx(best) or (found.solver == "moves" and found.cost <= best * 1.01)
    assert found.bound <= best * (1 + 1e-9)
    if found.certificate is not None:
        assert found.certificate.bound(problem.graph) == pytest.approx(found.bound)


@pytest.mark.parametrize(("rows", "width", "cluster"), [(512, 64, "gloo-1gbit"), (8, 512, "h100-node")])
def test_axes_together_cost_no_more_than_one_after_the_other(rows: int, width: int, cluster: str) -> None:
    x = torch.empty(rows, width)
    together, in_turn = (
        lowered(mlp(width, 2), F.mse_loss, x, x, mesh=(2, 4), cluster=cluster, search_mode=mode).simulate()
        for mode in ("dynamic_programming", "recursive_programming")
    )
    assert together.step_seconds <= in_turn.step_seconds * (1 + 1e-9)
