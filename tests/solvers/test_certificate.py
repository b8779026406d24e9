"""Choices that are not found by elimination, and the bounds that they come with."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_fx.errors import CommFuseError
from commfuse_fx.solvers.strategies import cheapest_choice as solver
from commfuse_fx.solvers.strategies.alike import alike
from commfuse_fx.solvers.strategies.certificate import Certificate
from commfuse_fx.solvers.strategies.cheapest_choice import Choice, cheapest_choice
from commfuse_fx.solvers.strategies.eliminate import Elimination, NoChoiceError
from commfuse_fx.solvers.strategies.factor_graph import FactorGraph, Table
from commfuse_fx.solvers.strategies.level_costs import Levelled
from tests.solvers.test_factor_graph import brute_force, chain, complete, graphs

NEVER = 0
"""Elimination makes no table of several variables at all."""


def by_moves(graph: FactorGraph) -> Choice | None:
    """The choice without elimination; None if no choice is allowed, or none was found that is."""
    try:
        return cheapest_choice(graph, largest=NEVER)
    except (NoChoiceError, CommFuseError):
        return None


@given(graph=graphs())
@settings(max_examples=200, deadline=None)
def test_the_bound_is_below_all_choices(graph: FactorGraph) -> None:
    found, best = by_moves(graph), brute_force(graph)
    if found is None:
        return
    assert found.cost == pytest.approx(graph.cost(found.states)) and best < inf
    assert found.bound <= best * (1 + 1e-9) + 1e-9 and best <= found.cost * (1 + 1e-9)
    if found.certificate is not None:
        assert min(found.cost, found.certificate.bound(graph)) == pytest.approx(found.bound)


def walked(graph: FactorGraph, is_apart: bool = True, begin: Certificate | None = None) -> Levelled:
    levelled = Levelled(graph, begin)
    levelled.walk(12)
    if is_apart:
        levelled.take_apart()
        levelled.walk(1)
    return levelled


@given(graph=graphs(), is_apart=st.booleans())
@settings(max_examples=100, deadline=None)
def test_what_states_cost_at_the_least(graph: FactorGraph, is_apart: bool) -> None:
    levelled = walked(graph, is_apart)
    bound, above = levelled.bound(), levelled.above()
    for number, table in enumerate(graph.unary):
        for state in range(len(table)):
            only = FactorGraph()
            only.pairs, only.once = graph.pairs, graph.once
            only.unary = [*graph.unary]
            only.unary[number] = np.where(np.arange(len(table)) == state, table, inf)
            assert bound + above[number][state] <= brute_force(only) + 1e-6


def other_costs(graph: FactorGraph, seed: int) -> FactorGraph:
    """The same variables with other costs, of which some are gone, as where other prices count."""
    random = np.random.default_rng(seed)

    def other(table: Table) -> Table:
        return table * random.choice([0.0, 0.3, 1.0, 2.0]) if np.isfinite(table).all() else table

    found = FactorGraph()
    found.unary = [other(table) for table in graph.unary]
    found.pairs = {pair: other(table) for pair, table in graph.pairs.items()}
    found.once = {key: other(table) for key, table in graph.once.items() if random.random() < 0.8}
    return found


@given(graph=graphs(), seed=st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_a_search_that_begins_with_what_another_one_has_found(graph: FactorGraph, seed: int) -> None:
    """Its bound is below all choices again, and can be worked out from its certificate alone."""
    before, now = by_moves(graph), other_costs(graph, seed)
    if before is None or before.shifts is None:
        return
    found, best = cheapest_choice(now, largest=NEVER, earlier=[before]), brute_force(now)
    assert found.cost == pytest.approx(now.cost(found.states)) and found.cost <= now.cost(before.states)
    assert found.bound <= best * (1 + 1e-9) + 1e-9 and best <= found.cost * (1 + 1e-9)
    if found.certificate is not None:
        assert min(found.cost, found.certificate.bound(now)) == pytest.approx(found.bound)


def test_shifts_of_other_costs_are_close_at_once() -> None:
    graph = complete(7, 4)
    now = graph.plus(graph, 0.1)
    cold, warm = (Levelled(now, begin) for begin in (None, walked(graph, is_apart=False).certificate()))
    for levelled in (cold, warm):
        levelled.walk(1)
    assert cold.bound() * 1.001 < warm.bound() <= cheapest_choice(now).cost * (1 + 1e-9)


@pytest.mark.parametrize("graph", [chain(20), complete(7, 4)], ids=["chain", "complete"])
def test_the_bound_of_alike_variables_is_that_of_their_certificate(graph: FactorGraph) -> None:
    levelled = walked(graph, is_apart=False)
    assert levelled.bound() == pytest.approx(levelled.certificate().bound(graph))


def test_more_walks_come_closer() -> None:
    graph = chain(12)
    best = cheapest_choice(graph).cost
    levelled = walked(graph)
    bounds = [levelled.bound()]
    for _ in range(3):
        levelled.walk(10)
        bounds.append(levelled.bound())
    assert bounds == sorted(bounds) and best * 0.9 < bounds[-1] <= best * (1 + 1e-9)


def test_walks_end_where_the_bound_rises_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of all pairs, which the bound stays far below."""
    graph, bounds = complete(9, 6), []

    class Noted(Levelled):
        def walk(self, times: int) -> None:
            super().walk(times)
            bounds.append(self.bound())

    monkeypatch.setattr(solver, "Levelled", Noted)
    found = cheapest_choice(graph, largest=NEVER)
    rises = [1 - before / bound for before, bound in pairwise(bounds)]
    assert found.gap > 2 * solver.CLOSE and 1 < len(rises) < solver.APART
    assert rises[-1] < solver.RISE < min(rises[:-1])


def test_walks_over_alike_variables_cost_as_one_block() -> None:
    counts = [len(set(alike(chain(blocks)).classes)) for blocks in (20, 40)]
    assert counts[0] == counts[1] < 40


def test_alike_variables_have_equally_many_pairs_of_each_kind() -> None:
    graph = chain(9)
    found = alike(graph)
    seen: dict[int, set[tuple[tuple[int, int], ...]]] = {}
    for number, own in enumerate(found.classes):
        kinds = ((kind, pair.index(number)) for pair, kind in found.kinds.items() if number in pair)
        seen.setdefault(own, set()).add(tuple(sorted(kinds)))
    assert all(len(each) == 1 for each in seen.values()) and len(seen) < len(graph.unary)


@given(costs=st.lists(st.floats(0, 3), min_size=2, max_size=2), readers=st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_costs_that_are_paid_once_are_divided(costs: list[float], readers: int) -> None:
    """What all need in any case counts whole, and once."""
    graph = FactorGraph()
    payer = graph.variable([0.0, 1.0])
    needs = {graph.variable([0.5, 0.0]): np.array([True, True]) for _ in range(readers)}
    graph.pay_once(payer, costs, needs)
    best = min(costs[0], 1 + costs[1])
    assert walked(graph).certificate().bound(graph) == pytest.approx(best) == pytest.approx(brute_force(graph))


def test_a_little_more_than_tiny_costs_is_too_much() -> None:
    graph = FactorGraph()
    payer, *readers = (graph.variable([0.0, 1e-9]) for _ in range(3))
    graph.pay_once(payer, [2e-9, 3e-9], {number: np.array([True, False]) for number in readers})
    certificate = walked(graph).certificate()
    assert certificate.bound(graph) == pytest.approx(2e-9)
    more = replace(certificate, shares={key: 1.0001 * share for key, share in certificate.shares.items()})
    with pytest.raises(ValueError, match="more is divided than variable 0 pays"):
        more.bound(graph)


def test_a_certificate_that_divides_more_than_there_is() -> None:
    graph = FactorGraph()
    payer, *readers = (graph.variable([0.0, 1.0]) for _ in range(3))
    graph.pay_once(payer, [2.0, 3.0], {number: np.array([True, False]) for number in readers})
    levelled = walked(graph)
    certificate = levelled.certificate()
    assert certificate.bound(graph) == pytest.approx(2.0) == pytest.approx(brute_force(graph))
    twice = replace(certificate, shares={key: 2 * share + 1 for key, share in certificate.shares.items()})
    with pytest.raises(ValueError, match="more is divided than variable 0 pays"):
        twice.bound(graph)
    less = replace(certificate, shares={key: share - 9 for key, share in certificate.shares.items()})
    with pytest.raises(ValueError, match="negative share"):
        less.bound(graph)


def test_moves_along_parts() -> None:
    """States of two parts, of which a move changes one."""
    graph = complete(7, 9)
    parts = [np.array([[state // 3, state % 3] for state in range(9)]).T] * 7
    found = cheapest_choice(graph, parts, largest=NEVER)
    assert found.solver == "moves" and found.bound <= cheapest_choice(graph).cost <= found.cost


def test_where_tables_are_too_large_a_variable_keeps_its_state() -> None:
    graph = complete(7, 4)
    start = (0,) * 7
    elimination = Elimination(graph, start)
    elimination.fold_all(100)
    assert graph.cost(elimination.states()) <= graph.cost(start) and elimination.largest <= 100
