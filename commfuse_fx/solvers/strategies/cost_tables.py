"""The costs of a graph as tables of variables, as many as come together.

What is paid once is a cost of the payer with all who may need it. Where they are few that is one table. Else more
variables follow the graph's own: for each who may need it, whether it or one before it does. So those that are far
apart do not meet in a table.

Why: docs/decisions.md, "What is too large for elimination gets a bound of its own, not an integer program".
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

import numpy as np

from commfuse_fx.solvers.strategies.factor_graph import FactorGraph, Once, Table

Scope = tuple[int, ...]
"""The variables of a table, lowest first."""

FEW = 1 << 12
"""Entries of a table of all who may need something."""


class CostTables:
    """The tables of a graph.

    unary: the costs of the states of each variable. together: those of several, by the variables.
    states: of all variables, for those of the graph's own that were given.
    """

    def __init__(self, graph: FactorGraph, states: Sequence[int] = ()) -> None:
        self.unary = list(graph.unary)
        self.together: dict[Scope, Table] = {}
        self.states = list(states)
        self._needed: dict[bytes, Table] = {}
        for pair, table in graph.pairs.items():
            self.together[pair] = table
        groups: dict[Scope, list[tuple[Once, Table]]] = {}
        for key, costs in graph.once.items():
            groups.setdefault((key.payer, *(number for number, _ in key.needs)), []).append((key, costs))
        known: dict[object, Table] = {}
        for scope, paid in groups.items():
            if prod(len(self.unary[number]) for number in scope) > FEW:
                for key, costs in paid:
                    self._one_after_the_other(key, costs)
                continue
            order = sorted(range(len(scope)), key=scope.__getitem__)
            content = tuple(order), tuple((id(costs), *(needed for _, needed in key.needs)) for key, costs in paid)
            if content not in known:
                total = sum((_of_all(key, costs) for key, costs in paid), start=np.zeros(()))
                known[content] = np.ascontiguousarray(total.transpose(order))
            self._add(tuple(sorted(scope)), known[content])

    def _add(self, scope: Scope, table: Table) -> None:
        before = self.together.get(scope)
        self.together[scope] = table if before is None else before + table

    def _one_after_the_other(self, key: Once, costs: Table) -> None:
        before: int | None = None
        is_needed = 0
        for number, needed in key.needs:
            if needed not in self._needed:
                self._needed[needed] = np.array([[inf if each else 0.0, 0.0] for each in needed])
            made = len(self.unary)
            self.unary.append(_EITHER)
            self.together[number, made] = self._needed[needed]
            if before is not None:
                self.together[before, made] = _STAYS
            before = made
            if self.states:
                is_needed = max(is_needed, needed[self.states[number]])
                self.states.append(is_needed)
        if before is not None:
            self.together[key.payer, before] = np.stack([np.zeros(len(costs)), costs], axis=1)


def stays_as_it_is(graph: FactorGraph, counts: Sequence[int]) -> bool:
    """Whether the tables of a graph have no variables but its own, if its variables have so many states."""
    return all(prod([counts[key.payer], *(counts[number] for number, _ in key.needs)]) <= FEW for key in graph.once)


def _of_all(key: Once, costs: Table) -> Table:
    """What is paid, by the states of the payer and those of all who may need it."""
    nobody = np.ones(())
    for _, needs in key.items():
        nobody = np.multiply.outer(nobody, ~needs)
    return np.multiply.outer(costs, 1.0 - nobody)


_EITHER = np.zeros(2)
"""Something is made, or not."""

_STAYS = np.array([[0.0, 0.0], [inf, 0.0]])
"""What has been made for one variable is there for the next."""
