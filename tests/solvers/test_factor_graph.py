"""The cheapest choice in graphs of variables with costs, against brute force."""

from __future__ import annotations

from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_fx.solvers.strategies import cost_tables, eliminate
from commfuse_fx.solvers.strategies.cheapest_choice import cheapest_choice
from commfuse_fx.solvers.strategies.eliminate import Elimination, NoChoiceError, TooWideError
from commfuse_fx.solvers.strategies.factor_graph import FactorGraph
from tests.solvers.integer_program import by_integer_program


def brute_force(graph: FactorGraph) -> float:
    return min(graph.cost(states) for states in product(*(range(len(table)) for table in graph.unary)))


COSTS = st.one_of(st.integers(0, 6).map(float), st.floats(0, 10), st.just(inf))


@st.composite
def graphs(draw: st.DrawFn) -> FactorGraph:
    graph = FactorGraph()
    for _ in range(draw(st.integers(1, 7))):
        graph.variable(draw(st.lists(COSTS, min_size=1, max_size=3)))
    count = len(graph.unary)
    for first, second in draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=14)):
        shape = (len(graph.unary[first]), len(graph.unary[second]))
        graph.pair(first, second, [[draw(COSTS) for _ in range(shape[1])] for _ in range(shape[0])])
    for _ in range(draw(st.integers(0, 2))):
        payer = draw(st.integers(0, count - 1))
        readers = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=4, unique=True))
        costs = [draw(st.floats(0, 10)) for _ in graph.unary[payer]]
        needs = {number: np.array([draw(st.booleans()) for _ in graph.unary[number]]) for number in readers}
        graph.pay_once(payer, costs, needs)
    return graph


@pytest.mark.parametrize("wide", [4, eliminate.WIDE], ids=["looks again", "looks once"])
@pytest.mark.parametrize("few", [4, cost_tables.FEW], ids=["chains", "tables"])
@given(graph=graphs())
@settings(max_examples=150, deadline=None)
def test_brute_force(graph: FactorGraph, wide: int, few: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eliminate, "WIDE", wide)
        patch.setattr(cost_tables, "FEW", few)
        equals_brute_force(graph)


def equals_brute_force(graph: FactorGraph) -> None:
    best = brute_force(graph)
    if best == inf:
        with pytest.raises(NoChoiceError):
            cheapest_choice(graph)
        return
    found = cheapest_choice(graph)
    assert found.cost == graph.cost(found.states) == pytest.approx(best)


@given(graph=graphs())
@settings(max_examples=60, deadline=None)
def test_the_integer_program(graph: FactorGraph) -> None:
    best = brute_force(graph)
    if best == inf:
        with pytest.raises(NoChoiceError):
            by_integer_program(graph)
        return
    found = by_integer_program(graph)
    assert found.cost == pytest.approx(best) and found.bound == pytest.approx(best)
    assert graph.cost(found.states) == pytest.approx(best)
    relaxed = by_integer_program(graph, whole=False)
    assert relaxed.bound <= best * (1 + 1e-9)


@given(graphs())
@settings(max_examples=100, deadline=None)
def test_without_dominated_states(graph: FactorGraph) -> None:
    best = brute_force(graph)
    if best < inf:
        elimination = Elimination(graph)
        elimination.fold_all(1 << 20)
        assert graph.cost(elimination.states()) == pytest.approx(best)


def test_ties_go_to_the_first_state() -> None:
    graph = FactorGraph()
    for _ in range(3):
        graph.variable([1, 1, 1])
    graph.pair(0, 1, np.zeros((3, 3)))
    assert cheapest_choice(graph).states == (0, 0, 0)


def complete(count: int, states: int, seed: int = 0) -> FactorGraph:
    numbers = np.random.default_rng(seed)
    graph = FactorGraph()
    for _ in range(count):
        graph.variable(numbers.random(states))
    for first in range(count):
        for second in range(first):
            graph.pair(first, second, numbers.random((states, states)))
    return graph


def test_tables_that_would_be_too_large() -> None:
    graph = complete(6, 4)
    found = cheapest_choice(graph)
    assert found.cost == pytest.approx(brute_force(graph)) and found.largest == 4**5
    with pytest.raises(TooWideError, match="a table of 1024 entries"):
        Elimination(graph).fold_all(1000)
    without_some = cheapest_choice(graph, largest=1000)  # those that the bound excludes
    assert without_some.solver == "elimination" and without_some.cost == pytest.approx(found.cost)
    by_moves = cheapest_choice(graph, largest=100)
    assert (found.solver, by_moves.solver) == ("elimination", "moves")
    assert by_moves.bound <= found.cost <= by_moves.cost


def test_a_dominated_state_goes_whatever_its_neighbours_are() -> None:
    graph = FactorGraph()
    one = graph.variable([0, 5, 1])
    other = graph.variable([0, 0])
    graph.pair(one, other, [[4, 4], [0, inf], [2, 3]])  # state 2 beats state 0, and 1 has one choice of its own
    elimination = Elimination(graph)
    assert elimination.drop_dominated() == [one, other]
    assert elimination.kept[one].tolist() == [2] and elimination.kept[other].tolist() == [0]


def test_neighbours_without_a_choice_may_be_many() -> None:
    graph = FactorGraph()
    both = graph.variable([0, 0, 1]), graph.variable([0, 1, 1])
    for number in range(100):  # more than an array can have dimensions
        fixed = graph.variable([0])
        for each in both:
            graph.pair(each, fixed, [[number % 2], [(number + 1) % 3], [0]])
    found = cheapest_choice(graph)
    assert (found.states[:2], found.cost) == ((2, 2), 2)
    graph.pair(both[0], graph.variable([inf]), [[0], [0], [0]])
    with pytest.raises(NoChoiceError):
        cheapest_choice(graph)


def chain(blocks: int) -> FactorGraph:
    """Equal blocks of three variables, one after the other."""
    numbers = np.random.default_rng(3)
    unary = numbers.random((3, 4))
    inside, between = numbers.random((3, 4, 4)), numbers.random((4, 4))
    graph = FactorGraph()
    for block in range(blocks):
        one, two, three = (graph.variable(costs) for costs in unary)
        for pair, costs in zip(((one, two), (two, three), (one, three)), inside, strict=True):
            graph.pair(*pair, costs)
        if block:
            graph.pair(one - 1, one, between)
    return graph


def test_equal_blocks_are_folded_once() -> None:
    works = []
    for blocks in (20, 40):
        elimination = Elimination(chain(blocks))
        elimination.fold_all(1 << 20)
        works.append(len(elimination._shared._results))
    assert works[1] < works[0] * 1.5 and len(chain(40).unary) == 120


def test_bad_input() -> None:
    graph = FactorGraph()
    with pytest.raises(ValueError, match="one or more states"):
        graph.variable([])
    graph.variable([0, 1])
    graph.variable([0, 1, 2])
    with pytest.raises(ValueError, match=r"variables 1 and 0 need the shape \(3, 2\), not \(2, 3\)"):
        graph.pair(1, 0, np.zeros((2, 3)))
    with pytest.raises(ValueError, match="a number or infinity"):
        graph.pair(0, 1, np.full((2, 3), np.nan))
