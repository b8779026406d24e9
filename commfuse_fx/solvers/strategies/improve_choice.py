"""A good choice in a graph whose tables are too large for elimination: the best among many at a time, again and again.

Each move leaves every variable some states, the present one among them, and takes the cheapest choice of these.

Why: docs/decisions.md, "What is too large for elimination gets a bound of its own, not an integer program".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from commfuse_fx.solvers.strategies.eliminate import Elimination, NoChoiceError
from commfuse_fx.solvers.strategies.factor_graph import FactorGraph, Table
from commfuse_fx.solvers.strategies.fewer_states import in_whole, with_states

Parts = Sequence[NDArray[np.intp]]
"""Of what parts the states of each variable are made, as on several mesh axes: [parts, states] of numbers."""

LARGEST = 1 << 14
"""Entries of a table in a move; where one would be larger, a variable keeps its present state."""

NEAREST = 4
"""States of a variable in a move to those that cost the least above the bound."""

WORTH = 2e-4
"""A part of the cost; moves that save less are among the last."""

MOST = 12
"""Moves, at most."""


def improve(graph: FactorGraph, states: Sequence[int], above: Sequence[Table], parts: Parts) -> tuple[int, ...]:
    """A choice that costs no more than this one.

    above: what states cost at the least above the bound. parts: a move leaves the states that differ in one part.
    """
    best, cost = tuple(states), graph.cost(states)
    nearest = [np.argsort(each, kind="stable")[:NEAREST] for each in above]
    count = max((len(each) for each in parts), default=0)
    in_vain = 0
    for number in range(MOST):
        part = number % (count + 1)
        if part < count:
            left = _all_alike_but(part, parts, best)
        else:
            left = [np.union1d(each, own) for each, own in zip(nearest, best, strict=True)]
        before = cost
        best, cost = _move(graph, best, cost, left)
        in_vain = in_vain + 1 if cost >= before * (1 - WORTH) else 0
        if in_vain > count // 2:
            break
    return best


def _all_alike_but(part: int, parts: Parts, states: Sequence[int]) -> list[NDArray[np.intp]]:
    known: dict[tuple[int, int], NDArray[np.intp]] = {}
    for each, own in zip(parts, states, strict=True):
        if (id(each), own) not in known:
            known[id(each), own] = _alike_but(part, each, own)
    return [known[id(each), own] for each, own in zip(parts, states, strict=True)]


def _alike_but(part: int, parts: NDArray[np.intp], state: int) -> NDArray[np.intp]:
    """The states that are as this one but for a part."""
    others = np.delete(parts, part, axis=0)
    return np.flatnonzero((others == others[:, [state]]).all(axis=0))


def _move(
    graph: FactorGraph, states: tuple[int, ...], cost: float, left: Sequence[NDArray[np.intp]]
) -> tuple[tuple[int, ...], float]:
    """The cheapest choice of these states that was found, or the present one, with its cost."""
    now = [int(np.searchsorted(each, own)) for each, own in zip(left, states, strict=True)]
    elimination = Elimination(with_states(graph, left), now)
    try:
        elimination.fold_all(LARGEST)
    except NoChoiceError:
        return states, cost
    found = in_whole(left, elimination.states())
    less = graph.cost(found)
    return (found, less) if less < cost else (states, cost)
