"""A bound below all choices in a graph of variables with costs, in a form from which anybody can work it out again.

Costs are shifted between tables that share a variable, which changes no choice's cost: what is taken off a pair of
variables for a state of one of them is added to the costs of that state. A cost that is paid once is divided among
those who need it. The sum of the least entries of all tables is then below the cost of every choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from commfuse_fx.solvers.strategies.factor_graph import FactorGraph, Pair, Table

ROUNDING = 1e-12
"""Error of sums of shares, as a part of the largest cost that is paid once."""


@dataclass(frozen=True)
class Certificate:
    """How costs are shifted in a graph, from which anybody can work out a bound below all choices.

    shifts: what each pair of variables gives away, by the states of the first and by those of the second one.
    shares: what each variable that needs something pays of what another one pays once, by payer and needing variable:
        an array of [states of the payer, its costs that are paid once, in the order of the graph].
    """

    shifts: Mapping[Pair, tuple[Table, Table]]
    shares: Mapping[tuple[int, int], Table]

    def bound(self, graph: FactorGraph) -> float:
        """No choice of the graph costs less. Raises ValueError if more than a cost is divided."""
        unary = list(graph.unary)
        paid = paid_once(graph)
        pairs = dict(graph.pairs)
        left = {payer: each.costs.copy() for payer, each in paid.items()}
        for (payer, reader), share in self.shares.items():
            needs = paid[payer].needs[reader]
            if share.min(initial=0.0) < 0:
                raise ValueError(f"variable {reader} takes a negative share of what variable {payer} pays")
            left[payer] -= share
            if (share[:, ~needs.any(axis=1)] > 0).any():
                raise ValueError(f"variable {reader} takes a share of what it never needs of variable {payer}")
            more = share @ needs
            pair, more = ((payer, reader), more) if payer < reader else ((reader, payer), more.T)
            pairs[pair] = pairs[pair] + more if pair in pairs else more
        most = max((float(each.costs.max()) for each in paid.values()), default=0.0)
        for payer, rest in left.items():
            if rest.min() < -ROUNDING * most:
                raise ValueError(f"more is divided than variable {payer} pays")
        found = 0.0
        for pair, table in pairs.items():
            if pair in self.shifts:
                one, other = self.shifts[pair]
                table = table - one[:, None] - other
                unary[pair[0]] = unary[pair[0]] + one
                unary[pair[1]] = unary[pair[1]] + other
            found += float(table.min())
        return found + sum(float(table.min()) for table in unary)


@dataclass(frozen=True)
class Paid:
    """What a variable pays once: costs [its states, what it pays for], and by variable the needs [what it pays for,
    states]."""

    costs: Table
    needs: Mapping[int, NDArray[np.bool_]]


def paid_once(graph: FactorGraph) -> dict[int, Paid]:
    """What each variable pays once."""
    costs: dict[int, list[Table]] = {}
    needs: dict[int, dict[int, dict[int, NDArray[np.bool_]]]] = {}
    for key, table in graph.once.items():
        own = costs.setdefault(key.payer, [])
        for reader, needed in key.items():
            needs.setdefault(key.payer, {}).setdefault(reader, {})[len(own)] = needed
        own.append(table)
    return {
        payer: Paid(
            np.stack(own, axis=1), {reader: _rows(each, len(own)) for reader, each in needs.get(payer, {}).items()}
        )
        for payer, own in costs.items()
    }


def _rows(given: Mapping[int, NDArray[np.bool_]], count: int) -> NDArray[np.bool_]:
    found = np.zeros((count, len(next(iter(given.values())))), dtype=np.bool_)
    for row, needed in given.items():
        found[row] = needed
    return found
