"""search_mode="recursive_programming": one mesh axis at a time, exactly, until nothing gets cheaper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.cost.model import CostModel
from commfuse_fx.ir.core.placement import P, Placement, R, S
from commfuse_fx.machine.presets import resolve_cluster
from commfuse_fx.passes.declaration import Variant, Variants
from commfuse_fx.planning import compile_call
from commfuse_fx.sharding.search.axis_by_axis import axis_by_axis
from commfuse_fx.sharding.search.axis_search import AxisSearch, Found
from commfuse_fx.sharding.search.layout_moves import cheapest_ways
from commfuse_fx.sharding.search.placement_costs import PlacementCosts
from commfuse_fx.solvers.strategies.cheapest_choice import cheapest_choice
from tests.models import CONV, MLP_CASE, TIED, Case
from tests.sharding.divided_oracle import compare
from tests.sharding.random_steps import random_step
from tests.undrawn import undrawn

MODE = {"parallel_mode": "auto", "search_mode": "recursive_programming"}

STEPS = [(4, (2, 4), "gloo-1gbit"), (3, (2, 2), "gloo-10gbit"), (2, (2, 4), "h100-node")]
"""Among them those for which some beginnings end far from the best."""

GLOO = resolve_cluster("gloo-1gbit")
WITHOUT_LATENCY = replace(
    GLOO,
    levels=tuple(replace(level, alpha=1e-9) for level in GLOO.levels),
    device=replace(GLOO.device, op_overhead=0.0, collective_overhead=0.0),
)
"""On which small models are divided, too."""


def search_of(seed: int, mesh: tuple[int, ...], name: str) -> tuple[AxisSearch, list[Any]]:
    program, axes = random_step(seed, 1 + seed % 4, mesh)
    return AxisSearch(program, CostModel(resolve_cluster(name))), axes


@pytest.mark.parametrize(("seed", "mesh", "name"), STEPS)
def test_close_to_all_axes_together(seed: int, mesh: tuple[int, ...], name: str) -> None:
    search, axes = search_of(seed, mesh, name)
    found, best = axis_by_axis(search, axes), cheapest_choice(search.problem(axes).graph, largest=1 << 22)
    assert best.solver == "elimination"
    assert best.cost * (1 - 1e-9) <= found.cost <= 1.1 * best.cost


@pytest.mark.parametrize("memory", [None, 0.5, 0.0])
def test_no_axis_alone_can_be_made_cheaper(memory: float | None) -> None:
    search, axes = search_of(3, (2, 2, 2), "gloo-1gbit")
    budget = None if memory is None else lambda least, most: least + memory * (most - least)
    found = axis_by_axis(search, axes, budget)
    assert [axis.group for axis in found.axes] == [axis.group for axis in axes] and found.gap is None
    for number, axis in enumerate(axes):
        free = [axis if at == number else each for at, each in enumerate(found.axes)]
        limit = None if memory is None else lambda *_: found.nbytes * (1 + 1e-9)
        again = search.cheapest(free, limit)
        assert again.cost >= found.cost * (1 - 1e-9) or again.nbytes > found.nbytes * (1 + 1e-9)


@pytest.mark.parametrize("solver", ["elimination", "moves"])
def test_axes_without_an_exact_solution_have_one_beginning(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each beginning takes several searches, which then take seconds each."""
    search, axes = search_of(3, (2, 2), "gloo-1gbit")
    cheapest, searched = AxisSearch.cheapest, []

    def count(self: AxisSearch, *args: Any) -> Found:
        searched.append(replace(cheapest(self, *args), solver=solver))
        return searched[-1]

    monkeypatch.setattr(AxisSearch, "cheapest", count)
    found = axis_by_axis(search, axes)
    assert found.cost == min(each.cost for each in searched if len(each.axes) == len(axes))
    assert len(searched) > 12 if solver == "elimination" else len(searched) <= 6


def test_less_memory_takes_longer() -> None:
    search, axes = search_of(3, (2, 2), "gloo-1gbit")
    found: list[Found] = [axis_by_axis(search, axes)]
    found += [
        axis_by_axis(search, axes, lambda least, most, part=part: least + part * (most - least)) for part in (0.5, 0)
    ]
    assert [each.nbytes for each in found] == sorted((each.nbytes for each in found), reverse=True)
    assert found[-1].nbytes < found[0].nbytes
    assert all(found[0].cost <= each.cost * (1 + 1e-9) for each in found)


@pytest.mark.parametrize(
    ("mesh", "cluster", "first"),
    [((2, 4), "h100-node", "dp"), ((2, 2), "h100-node", "tp"), ((8, 2), "h100-ib-2", "tp")],
)
def test_the_fastest_links_come_first(mesh: tuple[int, ...], cluster: str, first: str) -> None:
    """Two ranks of a node, the inner one of equal axes, and the ranks of a node before its counterparts in another."""
    program, axes = random_step(0, 1, mesh)
    assert AxisSearch(program, CostModel(resolve_cluster(cluster))).fastest_first(axes)[0].group == first


# Changes of layout on several axes

ONE, OTHER, BOTH = (0, 1), (0, 2), (0, 1, 2, 3)


def way(have: tuple[Placement, ...], wanted: tuple[Placement, ...], merged: bool = True) -> float:
    prices = {(0,): PlacementCosts(GLOO, OTHER), (1,): PlacementCosts(GLOO, ONE)}
    prices |= {(0, 1): PlacementCosts(GLOO, BOTH)} if merged else {}

    def nbytes(placements: tuple[Placement, ...]) -> float:
        return float(1 << 20) / 2 ** sum(each not in (R, P) for each in placements)

    return float(cheapest_ways([have], [wanted], prices, nbytes, False)[0, 0])


@pytest.mark.parametrize(("have", "kind"), [((P, P), "sum"), ((S(0), S(0)), "gather")])
def test_one_collective_over_both_axes(have: tuple[Placement, ...], kind: str) -> None:
    both = PlacementCosts(GLOO, BOTH)
    assert way(have, (R, R)) == pytest.approx(both.change(1 << 20, have[0], R))
    assert way(have, (R, R)) < way(have, (R, R), merged=False)


def test_blocks_are_gathered_one_axis_after_the_other() -> None:
    have = (S(0, 2), S(0, 2))
    assert way(have, (R, R)) == way(have, (R, R), merged=False)


def test_an_outer_axis_cannot_divide_what_an_inner_one_has_divided() -> None:
    """Rank (0, 1) holds the second half, but it needs the second quarter, which another rank holds."""
    assert way((R, S(0)), (S(0), S(0))) >= way((R, S(0)), (R, R)) > 0
    assert way((S(0), R), (S(0), S(0))) < way((R, S(0)), (R, R)) / 10  # every rank cuts its own part


def test_a_sum_is_made_of_parts() -> None:
    gathered = way((S(0), R), (R, R))
    assert way((S(0), P), (R, R)) < way((R, P), (R, R)) + gathered


# Whole steps


@pytest.mark.parametrize(("mesh", "saving"), [((2, 2), 200), ((4, 2), 0)], ids=str)
@pytest.mark.parametrize("case", [MLP_CASE, CONV, TIED], ids=lambda case: case.name)
def test_equals_one_device(case: Case, mesh: tuple[int, ...], saving: int, monkeypatch: pytest.MonkeyPatch) -> None:
    only = Variants((Variant.of(saving=saving),))
    monkeypatch.setattr(compile_call, "variants", lambda situation, program: only)
    found = compare(case, mesh, cluster=WITHOUT_LATENCY, gradients=False, **MODE)
    notes = [note.reason for note in found.program.notes if note.topic == "search"]
    assert any("one axis at a time" in each for each in notes)


def lowered(mesh: tuple[int, ...], rows: int = 32, mark: Any = None, **options: Any) -> Any:
    model = undrawn(lambda: nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)))
    if mark is not None:
        mark(model)
    optimizer = torch.optim.AdamW(model.parameters())
    options = {**MODE, "cluster": "h100-node", **options}
    x = torch.empty(rows, 1024)
    return cf.compile(model, loss_fn=F.mse_loss, optimizer=optimizer, mesh=mesh, device_num=8, **options).lower(x, x)


def test_a_file_gives_the_same_graph(tmp_path: Any) -> None:
    file = tmp_path / "strategies.json"
    found = lowered((2, 4), strategy_ckpt_save_file=file)
    again = lowered((2, 4), strategy_ckpt_load_file=file)
    assert again.text() == found.text()
    assert [note for note in again.program.notes if "not applied" in note.topic] == []


@pytest.mark.parametrize("rows", [64, 16384])
def test_never_slower_than_plain_plans(rows: int) -> None:
    """Data parallel, tensor parallel with it, and the parallel optimizer, all for one batch."""
    plain = {"parallel_mode": "semi_auto", "search_mode": "dynamic_programming", "rows": rows, "full_batch": True}
    found = [
        lowered((2, 4), **plain),
        lowered((2, 4), mark=megatron, **plain),
        lowered((2, 4), enable_parallel_optimizer=True, **plain),
    ]
    seconds = lowered((2, 4), rows=rows, full_batch=True).simulate().step_seconds
    assert all(seconds <= each.simulate().step_seconds * (1 + 1e-9) for each in found)


def megatron(model: nn.Module) -> None:
    cf.shard(model, "0", weight=("tp", None))
    cf.shard(model, "2", weight=(None, "tp"))
