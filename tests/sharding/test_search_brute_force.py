"""The search finds the cheapest of all choices of random small steps, and prices move it as they should."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from commfuse_fx.cost.model import CostModel
from commfuse_fx.machine.presets import resolve_cluster
from commfuse_fx.sharding.search import axis_search
from commfuse_fx.sharding.search.axis_search import AxisSearch
from commfuse_fx.sharding.search.priced_reads import KnownLayouts
from commfuse_fx.solvers.strategies.cheapest_choice import Choice, cheapest_choice
from commfuse_fx.solvers.strategies.factor_graph import FactorGraph
from tests.sharding.random_steps import none_is_cheaper, random_step

SEEDS = range(8)

GLOO = resolve_cluster("gloo-1gbit")


@pytest.mark.parametrize("name", ["h100-node", "gloo-1gbit"])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_choice_is_cheaper(seed: int, name: str) -> None:
    program, axes = random_step(seed, 1, (2,))
    graph = AxisSearch(program, CostModel(resolve_cluster(name))).problem(axes).graph
    assert 10 < len(graph.unary) < 40
    found = cheapest_choice(graph)
    assert found.solver == "elimination" and found.cost == graph.cost(found.states)
    assert none_is_cheaper(graph, found.cost) and not none_is_cheaper(graph, found.cost * 1.001)


@pytest.mark.parametrize("seed", [2, 3])
def test_where_moves_stay_far_from_the_bound_tables_may_be_large(seed: int) -> None:
    program, axes = random_step(seed, 1 + seed % 4, (2, 4))
    problem = AxisSearch(program, CostModel(GLOO)).problem(axes)
    found = cheapest_choice(problem.graph, problem.parts)
    assert found.solver == "elimination" and found.cost == problem.graph.cost(found.states)
    by_moves = cheapest_choice(problem.graph, problem.parts, largest=0)
    assert by_moves.bound <= found.cost < by_moves.cost * (1 + 1e-9) and by_moves.gap > 0.01


EXPOSED = ("", "20% of forward on dp, 10% of gradients on tp", "90% of forward on tp, 40% of gradients on dp")


@pytest.mark.parametrize("seed", [1, 4])
def test_searches_of_one_compile_begin_with_what_others_have_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program, axes = random_step(seed, 1 + seed % 4, (2, 4))
    solved: list[tuple[FactorGraph, Choice, int]] = []

    def solve(graph: FactorGraph, parts: object, earlier: list[Choice]) -> Choice:
        found = cheapest_choice(graph, parts, largest=0, earlier=earlier)
        solved.append((graph, found, len(earlier)))
        return found

    monkeypatch.setattr(axis_search, "cheapest_choice", solve)
    costs = []
    for _ in range(2):  # the same again
        known = KnownLayouts()
        for exposed in EXPOSED:
            AxisSearch(program, CostModel(GLOO), exposed, known).cheapest(axes)
        costs.append([found.cost for _, found, _ in solved[-len(EXPOSED) :]])
    assert costs[0] == costs[1] and [count for _, _, count in solved] == [0, 1, 2] * 2
    for graph, found, _ in solved[: len(EXPOSED)]:
        best = cheapest_choice(graph, largest=1 << 22)
        assert best.solver == "elimination" and found.bound <= best.cost * (1 + 1e-9)
        assert best.cost * (1 - 1e-9) <= found.cost == graph.cost(found.states) <= 1.01 * best.cost
        assert found.certificate is None or min(found.cost, found.certificate.bound(graph)) == pytest.approx(
            found.bound
        )


def test_work_does_not_depend_on_the_number_of_ranks() -> None:
    """As many variables, with as many states, and the same strategies where everything divides."""
    sizes, states = [], []
    for ranks in (4, 16):
        program, axes = random_step(1, 3, (ranks,))
        search = AxisSearch(program, CostModel(GLOO))
        sizes.append([len(table) for table in search.problem(axes).graph.unary])
        (axis,) = search.cheapest(axes).axes
        states.append((axis.states, {key: pin.placement for key, pin in axis.parameters.items()}))
    assert sizes[0] == sizes[1] and states[0] == states[1]


def graph_at(seed: int, bandwidth: float) -> FactorGraph:
    """The choices of a step on links with so many times the bandwidth, where messages take no time but for bytes."""
    levels = tuple(replace(level, alpha=0.0, bandwidth=level.bandwidth * bandwidth) for level in GLOO.levels)
    device = replace(GLOO.device, op_overhead=0.0, collective_overhead=0.0)
    program, axes = random_step(seed, 3, (4,))
    return AxisSearch(program, CostModel(replace(GLOO, levels=levels, device=device))).problem(axes).graph


@pytest.mark.parametrize("seed", SEEDS)
def test_more_bandwidth_sends_no_less(seed: int) -> None:
    graphs = [graph_at(seed, 4.0**power) for power in range(8)]
    sent = []
    for number, (graph, faster) in enumerate(pairwise(graphs)):
        states = cheapest_choice(graph).states
        sent.append(4.0**number * (graph.cost(states) - faster.cost(states)))  # in proportion to the bytes
    assert all(one <= other * (1 + 1e-6) + 1e-12 for one, other in pairwise(sent))
