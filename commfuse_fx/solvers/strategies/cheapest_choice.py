"""The cheapest choice in a graph of variables with costs: by elimination where tables stay small.

Elsewhere costs are levelled out, which gives a bound below all choices, and a choice is improved until it is close to
that. States that the bound excludes go, and elimination may then be possible after all; where the choice stays far from
the bound and variables are few, elimination with large tables is tried. Nothing looks at a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from commfuse_fx.errors import CommFuseError
from commfuse_fx.solvers.strategies.certificate import Certificate
from commfuse_fx.solvers.strategies.cost_tables import stays_as_it_is
from commfuse_fx.solvers.strategies.eliminate import WIDE, Elimination, TooWideError
from commfuse_fx.solvers.strategies.factor_graph import FactorGraph
from commfuse_fx.solvers.strategies.fewer_states import in_whole, with_states
from commfuse_fx.solvers.strategies.improve_choice import Parts, improve
from commfuse_fx.solvers.strategies.level_costs import Levelled

LARGEST = 1 << 20
"""Entries of a table that elimination still makes: 8 MiB."""

CLOSE = 0.01
"""A gap that is small enough, as a part of the cost."""

TOGETHER = 12
"""Walks there and back over the classes of variables that lie alike."""

AGAIN = 4
"""The same, where they begin with shifts for other costs."""

APART = 24
"""Walks over all variables, at most."""

RISE = 2e-4
"""A part of the bound; a walk over all variables that raises it by less is the last one."""

SMALL = 64
"""Variables of a graph for which large tables are tried where a choice of several parts stays far from the bound."""

GUESSES = 4
"""Choices that were read off last, of which the best one is improved."""


@dataclass(frozen=True)
class Choice:
    """The cheapest choice that was found.

    states: one per variable.
    cost: their cost.
    bound: no choice costs less.
    solver: what has found it: "elimination", which is exact, or "moves", with a bound.
    largest: entries of the largest table on the way.
    certificate: how the bound can be worked out from the graph; None where elimination has found the choice.
    shifts: like the certificate, of variables that lie alike together: with what a search of other costs may begin.
    """

    states: tuple[int, ...]
    cost: float
    bound: float
    solver: str
    largest: int = 0
    certificate: Certificate | None = None
    shifts: Certificate | None = None

    @property
    def gap(self) -> float:
        """How much more than the least cost it may cost, as a part of its own; 0 where it is exact."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost else 0.0


def cheapest_choice(
    graph: FactorGraph, parts: Parts = (), largest: int = LARGEST, earlier: Sequence[Choice] = ()
) -> Choice:
    """The cheapest choice; of equal ones, always the same.

    parts: of what parts the states of each variable are made, for moves that change one part. largest: entries of a
    table that elimination may make. earlier: choices for graphs of the same variables with other costs, of which the
    one that costs least here is begun with.

    Raises NoChoiceError if every choice is forbidden, and CommFuseError if none that is allowed was found.
    """
    several = max((len(each) for each in parts), default=1) > 1
    found = None
    if not several or stays_as_it_is(graph, [len(table) for table in graph.unary]):
        found = _exact(graph, min(largest, WIDE) if several else largest)
    found = found or _by_moves(graph, parts, largest, earlier)
    if several and found.gap > CLOSE and len(graph.unary) <= SMALL:
        found = _exact(graph, largest) or found
    return found


def _exact(graph: FactorGraph, largest: int) -> Choice | None:
    """The cheapest choice, unless a table would be too large."""
    elimination = Elimination(graph)
    try:
        elimination.drop_dominated()
        elimination.fold_all(largest)
    except TooWideError:
        return None
    states = elimination.states()
    cost = graph.cost(states)
    return Choice(states, cost, cost, "elimination", elimination.largest)


def _by_moves(graph: FactorGraph, parts: Parts, largest: int, earlier: Sequence[Choice]) -> Choice:
    known = min(earlier, key=lambda each: graph.cost(each.states), default=None)
    levelled = Levelled(graph, None if known is None else known.shifts)
    levelled.walk(TOGETHER if known is None else AGAIN)
    states, cost = _improved(graph, levelled, parts, () if known is None else (known.states,))
    shifts = levelled.certificate()
    if not _is_close(cost, levelled.bound()):
        levelled.take_apart()
        _raise_bound(levelled, cost)
        if cost == inf:
            states, cost = _improved(graph, levelled, parts)
    if cost == inf:
        raise CommFuseError("the search for strategies has found none that is allowed: give fewer marks")
    certificate = levelled.certificate()
    bound = min(cost, certificate.bound(graph))
    left = [
        np.union1d(np.flatnonzero(above <= cost - bound), own)
        for above, own in zip(levelled.above(), states, strict=True)
    ]
    if stays_as_it_is(graph, [len(each) for each in left]):
        found = _exact(with_states(graph, left), largest)
        if found is not None:
            exact = in_whole(left, found.states)
            least = graph.cost(exact)
            if least <= cost:
                return replace(found, states=exact, cost=least, bound=least, shifts=shifts)
    return Choice(states, cost, bound, "moves", certificate=certificate, shifts=shifts)


def _improved(
    graph: FactorGraph, levelled: Levelled, parts: Parts, others: Sequence[Sequence[int]] = ()
) -> tuple[tuple[int, ...], float]:
    """The best of the last guesses and of other choices, improved, and what it costs."""
    start = min((*levelled.guesses[-GUESSES:], *others), key=graph.cost)
    states = improve(graph, start, levelled.above(), parts)
    return states, graph.cost(states)


def _raise_bound(levelled: Levelled, cost: float) -> None:
    """Walk until the bound is close to a cost, or rises too little."""
    bound = levelled.bound()
    for _ in range(APART):
        before = bound
        levelled.walk(1)
        bound = levelled.bound()
        if _is_close(cost, bound) or bound - before < RISE * abs(bound):
            return


def _is_close(cost: float, bound: float) -> bool:
    return cost < inf and cost - bound <= CLOSE * cost
