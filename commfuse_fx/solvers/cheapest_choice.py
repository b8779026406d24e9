"""The cheapest choice in a graph of variables with costs: by elimination where tables stay small.

Elsewhere costs are levelled out, which gives a bound below all choices, and a choice is improved until it is close to
that. States that the bound excludes go, and elimination may then be possible after all. Nothing looks at a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from commfuse_fx.errors import CommFuseError
from commfuse_fx.solvers.certificate import Certificate
from commfuse_fx.solvers.cost_tables import CostTables
from commfuse_fx.solvers.eliminate import WIDE, Elimination, TooWideError
from commfuse_fx.solvers.factor_graph import FactorGraph
from commfuse_fx.solvers.fewer_states import with_states
from commfuse_fx.solvers.improve_choice import Parts, improve
from commfuse_fx.solvers.level_costs import Levelled

LARGEST = 1 << 20
"""Entries of a table that elimination still makes: 8 MiB."""

CLOSE = 0.01
"""A gap that is small enough, as a part of the cost."""

WALKS = 4
"""Walks over all variables between two looks at the bound."""

LOOKS = 5
"""How often more walks may follow."""


@dataclass(frozen=True)
class Choice:
    """The cheapest choice that was found.

    states: one per variable.
    cost: their cost.
    bound: no choice costs less.
    solver: what has found it: "elimination", which is exact, or "moves", with a bound.
    largest: entries of the largest table on the way.
    certificate: how the bound can be worked out from the graph; None where elimination has found the choice.
    """

    states: tuple[int, ...]
    cost: float
    bound: float
    solver: str
    largest: int = 0
    certificate: Certificate | None = None

    @property
    def gap(self) -> float:
        """How much more than the least cost it may cost, as a part of its own; 0 where it is exact."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost else 0.0


def cheapest_choice(graph: FactorGraph, parts: Parts = (), largest: int = LARGEST) -> Choice:
    """The cheapest choice; of equal ones, always the same.

    parts: of what parts the states of each variable are made, for moves that change one part. largest: entries of a
    table that elimination may make.

    Raises NoChoiceError if every choice is forbidden, and CommFuseError if none that is allowed was found.
    """
    several = max((len(each) for each in parts), default=1) > 1
    found = None
    if not (several and len(CostTables(graph).unary) > len(graph.unary)):
        found = _exact(graph, min(largest, WIDE) if several else largest)
    return found or _by_moves(graph, parts, largest)


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


def _by_moves(graph: FactorGraph, parts: Parts, largest: int) -> Choice:
    levelled = Levelled(graph)
    states = improve(graph, min(levelled.guesses, key=graph.cost), levelled.above(), parts)
    cost = graph.cost(states)
    for _ in range(LOOKS):
        if cost - levelled.bound() <= CLOSE * cost:
            break
        levelled.walk(WALKS)
    if cost == np.inf:
        raise CommFuseError("the search for strategies has found none that is allowed: give fewer marks")
    certificate = levelled.certificate()
    bound = min(cost, certificate.bound(graph))
    left = [
        np.union1d(np.flatnonzero(above <= cost - bound), own)
        for above, own in zip(levelled.above(), states, strict=True)
    ]
    rest = with_states(graph, left)
    if len(CostTables(rest).unary) == len(graph.unary):
        found = _exact(rest, largest)
        if found is not None:
            exact = tuple(int(each[own]) for each, own in zip(left, found.states, strict=True))
            if graph.cost(exact) <= cost:
                return replace(found, states=exact, cost=graph.cost(exact), bound=graph.cost(exact))
    return Choice(states, cost, bound, "moves", certificate=certificate)
