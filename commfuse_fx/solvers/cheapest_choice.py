"""The cheapest choice in a graph of variables with costs: by elimination where tables stay small, else by HiGHS."""

from __future__ import annotations

from dataclasses import dataclass

from commfuse_fx.solvers.eliminate import Elimination, TooWideError
from commfuse_fx.solvers.factor_graph import FactorGraph
from commfuse_fx.solvers.integer_program import by_integer_program

LARGEST = 1 << 22
"""Entries of a table that elimination still makes: 32 MiB."""

EXACT = 1e-9
"""How far the cost may be from the bound, as a part of it, and counts as equal."""


@dataclass(frozen=True)
class Choice:
    """The cheapest choice that was found.

    states: one per variable.
    cost: their cost.
    bound: no choice costs less.
    solver: what has found it: "elimination" or "integer program".
    largest: entries of the largest table on the way.
    """

    states: tuple[int, ...]
    cost: float
    bound: float
    solver: str
    largest: int

    @property
    def gap(self) -> float:
        """How much more than the least cost it may cost, as a part of its own; 0 where it is exact."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost else 0.0


def cheapest_choice(graph: FactorGraph, largest: int = LARGEST, seconds: float = 60.0) -> Choice:
    """The cheapest choice; of equal ones, always the same.

    largest: entries of a table that elimination may make. seconds: the time that the integer program may take.

    Raises NoChoiceError if every choice is forbidden, and what `by_integer_program` raises.
    """
    elimination = Elimination(graph.in_pairs())
    elimination.drop_dominated()
    try:
        elimination.fold_all(largest)
    except TooWideError:
        return _by_program(graph, seconds)
    states = elimination.states()[: len(graph.unary)]
    cost = graph.cost(states)
    return Choice(states, cost, cost, "elimination", elimination.largest)


def _by_program(graph: FactorGraph, seconds: float) -> Choice:
    elimination = Elimination(graph.in_pairs())
    elimination.drop_dominated()
    elimination.fold_few()
    elimination.drop_dominated()
    elimination.fold_few()
    found = by_integer_program(elimination.unary, elimination.tables, seconds)
    left = {number: int(elimination.kept[number][state]) for number, state in found.states.items()}
    states = elimination.states(left)[: len(graph.unary)]
    cost = graph.cost(states)
    # What folding has taken off is the difference between the two costs of one choice.
    return Choice(states, cost, cost - (found.cost - found.bound), "integer program", elimination.largest)
