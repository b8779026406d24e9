"""A graph of variables with costs, of which each one takes one of a few states.

Numbers only. Each variable has a cost per state, and each pair of neighbours a cost per pair of states. Infinity
forbids a state or a pair. Some costs a variable pays once if any of several others needs what it pays for. The cheapest
choice has the least sum of all. `solvers.cheapest_choice` finds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]

Pair = tuple[int, int]
"""Two variables, the lower number first."""


@dataclass(frozen=True)
class Once:
    """Who pays a cost once, and for whom.

    payer: a variable. needs: other variables, each with a byte per state, 1 where that state needs what is paid for.
    """

    payer: int
    needs: tuple[tuple[int, bytes], ...]

    def items(self) -> Iterator[tuple[int, NDArray[np.bool_]]]:
        """The variables that may need it, each with whether each of its states does."""
        for number, needed in self.needs:
            yield number, np.frombuffer(needed, dtype=np.bool_)

    def is_needed(self, states: Sequence[int]) -> bool:
        return any(needed[states[number]] for number, needed in self.needs)


class FactorGraph:
    """Variables are numbered in the order in which they are added.

    unary: the costs of the states of each variable, an array of [states].
    pairs: the costs of the states of two variables, an array of [states of the first, states of the second], by their
        numbers, the lower one first.
    once: what a variable pays in each of its states if any of others needs it.
    """

    def __init__(self) -> None:
        self.unary: list[Table] = []
        self.pairs: dict[Pair, Table] = {}
        self.once: dict[Once, Table] = {}

    def variable(self, costs: Sequence[float] | Table) -> int:
        """Add a variable with these costs, one per state. Returns its number."""
        table = np.asarray(costs, dtype=np.float64)
        if table.ndim != 1 or not len(table):
            raise ValueError(f"a variable needs costs for one or more states in one row, not those of {table.shape}")
        _check(table)
        self.unary.append(table)
        return len(self.unary) - 1

    def pair(self, first: int, second: int, costs: Sequence[Sequence[float]] | Table) -> None:
        """Add costs [states of the first, states of the second] to a pair; of one variable with itself the diagonal."""
        table = np.asarray(costs, dtype=np.float64)
        wanted = (len(self.unary[first]), len(self.unary[second]))
        if table.shape != wanted:
            raise ValueError(f"the costs of variables {first} and {second} need the shape {wanted}, not {table.shape}")
        _check(table)
        if first == second:
            self.unary[first] = self.unary[first] + np.diagonal(table)
            return
        if first > second:
            first, second, table = second, first, table.T
        known = self.pairs.get((first, second))
        self.pairs[first, second] = table if known is None else known + table

    def pay_once(self, payer: int, costs: Sequence[float] | Table, needs: Mapping[int, NDArray[np.bool_]]) -> None:
        """Add costs of the states of a variable, which count if a state of any other one needs what they are paid for.

        needs: by variable, whether each of its states does.
        """
        table = np.asarray(costs, dtype=np.float64)
        wanted = (len(self.unary[payer]),)
        if table.shape != wanted or not (table >= 0).all() or np.isinf(table).any():
            raise ValueError(f"what variable {payer} pays once needs {wanted[0]} numbers from 0 on")
        for number, needed in needs.items():
            if needed.shape != self.unary[number].shape:
                raise ValueError(f"variable {number} has {len(self.unary[number])} states, but {len(needed)} needs")
        if payer in needs:
            self.unary[payer] = self.unary[payer] + table * needs[payer]
            table = table * ~needs[payer]
        others = sorted(number for number in needs if number != payer)
        key = Once(payer, tuple((number, needs[number].astype(np.bool_).tobytes()) for number in others))
        known = self.once.get(key)
        self.once[key] = table if known is None else known + table

    def cost(self, states: Sequence[int]) -> float:
        """The cost of a choice of one state per variable."""
        found = sum(float(table[state]) for table, state in zip(self.unary, states, strict=True))
        found += sum(float(table[states[one], states[other]]) for (one, other), table in self.pairs.items())
        return found + sum(float(table[states[key.payer]]) for key, table in self.once.items() if key.is_needed(states))

    def most(self) -> float:
        """More than any choice costs that is not forbidden."""
        tables = (table[np.isfinite(table)] for table in (*self.unary, *self.pairs.values(), *self.once.values()))
        return sum(float(table.max(initial=0.0)) for table in tables) + 1e-9

    def plus(self, other: FactorGraph, factor: float) -> FactorGraph:
        """The graph with so many times the costs of another one of the same variables. Equal tables stay one object."""
        known: dict[tuple[int, int], Table] = {}
        nothing = np.zeros(())

        def total(one: Table | None, more: Table | None) -> Table:
            key = (id(one), id(more))
            if key not in known:
                known[key] = (nothing if one is None else one) + factor * (nothing if more is None else more)
            return known[key]

        both = FactorGraph()
        both.unary = [total(one, more) for one, more in zip(self.unary, other.unary, strict=True)]
        both.pairs = {pair: total(self.pairs.get(pair), other.pairs.get(pair)) for pair in self.pairs | other.pairs}
        both.once = {key: total(self.once.get(key), other.once.get(key)) for key in self.once | other.once}
        return both


def _check(table: Table) -> None:
    if not table.min(initial=inf) > -inf:  # nor is a number that is none
        raise ValueError("a cost has to be a number or infinity, which forbids a state")
