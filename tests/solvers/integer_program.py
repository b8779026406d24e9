"""The cheapest choice in a graph of variables with costs, as an integer program.

Each state of a variable is a number that is 0 or 1, and so is each pair of states of two neighbours: the sum of the
pairs with a state is that state. What is forbidden has no number. What a variable pays once in a state is a number that
is no less than the sum of the pairs in which a reader needs it. SciPy's HiGHS solves it, and proves a lower bound.

Source: Koster, van Hoesel and Kolen, "The partial constraint satisfaction problem: facets and lifting theorems"
(Operations Research Letters 23, 1998).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from commfuse_fx.solvers.strategies.eliminate import NoChoiceError
from commfuse_fx.solvers.strategies.factor_graph import FactorGraph, Pair

LARGEST = 1e3
"""The largest cost as HiGHS sees it, whose tolerances are absolute: a search has costs of microseconds, in seconds."""


@dataclass(frozen=True)
class ProgramResult:
    """What an integer program has given.

    states: of the variables. cost: their cost. bound: no choice costs less.
    """

    states: Sequence[int]
    cost: float
    bound: float


def by_integer_program(graph: FactorGraph, whole: bool = True) -> ProgramResult:
    """The cheapest states of these variables. whole: otherwise numbers may be fractions, and only the bound counts.

    Raises NoChoiceError if every choice is forbidden.
    """
    program = _Program()
    states = [program.numbers(table) for table in graph.unary]
    for own in states:
        program.equal([own], 1.0)
    pairs: dict[Pair, NDArray[np.intp]] = {}

    def pair(one: int, other: int) -> NDArray[np.intp]:
        """The numbers of the pairs of states of these two, as [states of the one, of the other]."""
        key = (min(one, other), max(one, other))
        if key not in pairs:
            shape = len(states[key[0]]), len(states[key[1]])
            made = pairs[key] = program.numbers(graph.pairs.get(key, np.zeros(shape)))
            for axis, number in enumerate(key):
                for state, own in enumerate(states[number]):
                    program.equal([made.take(state, axis=axis)], 0.0, own)
        return pairs[key] if key == (one, other) else pairs[key].T

    for one, other in graph.pairs:
        pair(one, other)
    for paid, costs in graph.once.items():
        made = program.numbers(costs)
        for reader, needs in paid.items():
            for own, with_reader in zip(made, pair(paid.payer, reader), strict=True):
                program.no_more([with_reader[needs]], own)
    result = program.solve(sum(map(len, states)) if whole else 0)
    chosen = [int(np.argmax(np.where(own < 0, 0.0, result.x[own]))) for own in states]
    bound = result.mip_dual_bound if whole else result.fun
    return ProgramResult(chosen, result.fun * program.unit, -inf if bound is None else bound * program.unit)


@dataclass
class _Program:
    """Numbers with costs, and what holds of their sums. The number -1 is always 0."""

    costs: list[float] = field(default_factory=list)
    rows: list[NDArray[np.intp]] = field(default_factory=list)
    columns: list[NDArray[np.intp]] = field(default_factory=list)
    values: list[NDArray[np.float64]] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)

    def numbers(self, costs: NDArray[np.float64]) -> NDArray[np.intp]:
        """New ones for the costs that are finite."""
        allowed = np.isfinite(costs)
        found = np.full(costs.shape, -1)
        found[allowed] = np.arange(len(self.costs), len(self.costs) + int(allowed.sum()))
        self.costs += costs[allowed].tolist()
        return found

    def equal(self, terms: Sequence[NDArray[np.intp]], right: float, minus: int = -1) -> None:
        self._row(terms, minus, right, right)

    def no_more(self, terms: Sequence[NDArray[np.intp]], minus: int) -> None:
        self._row(terms, minus, -inf, 0.0)

    def _row(self, terms: Sequence[NDArray[np.intp]], minus: int, least: float, most: float) -> None:
        own = np.concatenate([*terms, [minus]])
        values = np.ones(len(own))
        values[-1] = -1.0
        taken = own >= 0
        self.rows.append(np.full(int(taken.sum()), len(self.least)))
        self.columns.append(own[taken])
        self.values.append(values[taken])
        self.least.append(least)
        self.most.append(most)

    @property
    def unit(self) -> float:
        return max(map(abs, self.costs), default=0.0) / LARGEST or 1.0

    def solve(self, whole: int) -> object:
        """whole: so many of the first numbers are 0 or 1."""
        if not self.costs:
            raise NoChoiceError("every choice is forbidden")
        entries = np.concatenate(self.values), (np.concatenate(self.rows), np.concatenate(self.columns))
        matrix = coo_array(entries, shape=(len(self.least), len(self.costs)))
        result = milp(
            np.array(self.costs) / self.unit,
            integrality=np.arange(len(self.costs)) < whole,
            bounds=Bounds(0.0, 1.0),
            constraints=LinearConstraint(matrix.tocsr(), self.least, self.most),
            options={"mip_rel_gap": 0.0},
        )
        if result.status == 2:
            raise NoChoiceError("every choice is forbidden")
        return result
