"""The cheapest choice whose amount stays within a budget, against brute force."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_fx.solvers.strategies.cheapest_choice import Choice, cheapest_choice
from commfuse_fx.solvers.strategies.factor_graph import FactorGraph
from commfuse_fx.solvers.strategies.within_budget import within_budget

NUMBERS = st.integers(0, 9).map(float)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[FactorGraph, FactorGraph]:
    """Costs, some of which forbid a pair, and amounts."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    both = FactorGraph(), FactorGraph()
    for graph in both:
        for size in sizes:
            graph.variable([draw(NUMBERS) for _ in range(size)])
    for one, other in draw(st.sets(st.tuples(st.integers(0, len(sizes) - 1), st.integers(0, len(sizes) - 1)))):
        if one < other:
            shape = range(sizes[one]), range(sizes[other])
            costs = [[draw(NUMBERS) for _ in shape[1]] for _ in shape[0]]
            if draw(st.booleans()) and sizes[one] > 1:
                costs[-1][-1] = inf
            both[0].pair(one, other, costs)
            if draw(st.booleans()):
                both[1].pair(one, other, [[draw(NUMBERS) for _ in shape[1]] for _ in shape[0]])
    return both


@given(graphs(), st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]))
@settings(max_examples=150, deadline=None)
def test_brute_force(given: tuple[FactorGraph, FactorGraph], part: float) -> None:
    costs, amounts = given
    choices = list(product(*(range(len(table)) for table in costs.unary)))
    points = [(amounts.cost(each), costs.cost(each)) for each in choices if costs.cost(each) < inf]
    if not points:
        return
    cheapest = cheapest_choice(costs)
    most = amounts.cost(cheapest.states)
    least = min(amount for amount, _ in points)
    found = within_budget(costs, amounts, lambda least, most: least + part * (most - least), cheapest)
    amount = amounts.cost(found.states)
    assert amount <= least + part * (most - least) + 1e-9
    assert found.cost == pytest.approx(costs.cost(found.states))
    assert found.cost == pytest.approx(min(cost for other, cost in points if other <= amount))
    best = min(cost for other, cost in points if other <= least + part * (most - least) + 1e-9)
    assert found.bound <= best + 1e-6
    if part in (0.0, 1.0):
        assert found.cost == pytest.approx(best)


def test_few_graphs_are_solved() -> None:
    """Each of 64 variables may pay another price for the same gain, so that there are 65 corners."""
    costs, amounts = FactorGraph(), FactorGraph()
    for number in range(64):
        costs.variable([0, 1 + number])
        amounts.variable([1, 0])
    solved: list[Choice] = []

    def solve(graph: FactorGraph) -> Choice:
        solved.append(cheapest_choice(graph))
        return solved[-1]

    found = within_budget(costs, amounts, lambda least, most: (least + most) / 2, cheapest_choice(costs), solve)
    assert (amounts.cost(found.states), found.cost, found.gap) == (32, sum(range(1, 33)), pytest.approx(0.0))
    assert len(solved) < 12


@given(graphs(), st.sampled_from([0.0, 0.5, 1.0]), st.data())
@settings(max_examples=100, deadline=None)
def test_choices_that_are_not_exact(given: tuple[FactorGraph, FactorGraph], part: float, data: st.DataObject) -> None:
    """A choice with less of both may be found where only amounts count, or one with more of both."""
    costs, amounts = given
    choices = [each for each in product(*(range(len(table)) for table in costs.unary)) if costs.cost(each) < inf]
    if not choices:
        return
    seen: list[tuple[int, ...]] = []

    def solve(graph: FactorGraph) -> Choice:
        assert all(table.min() >= 0 for table in graph.unary)
        seen.append(data.draw(st.sampled_from(choices)))
        return Choice(seen[-1], graph.cost(seen[-1]), 0.0, "at random")

    found = within_budget(costs, amounts, lambda least, most: least + part * (most - least), solve(costs), solve)
    cost, amount = costs.cost(found.states), amounts.cost(found.states)
    assert found.cost == cost
    assert all(costs.cost(each) >= cost or amounts.cost(each) >= amount for each in seen[:2])
