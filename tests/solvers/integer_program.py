"""The cheapest choice in a graph of variables with costs, as an integer program.

Each state of a variable is a number that is 0 or 1, and so is each pair of states of two neighbours: the sum of the
pairs with a state is that state. What is forbidden has no number. SciPy's HiGHS solves it, and proves a lower bound.

Source: Koster, van Hoesel and Kolen, "The partial constraint satisfaction problem: facets and lifting theorems"
(Operations Research Letters 23, 1998).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from commfuse_fx.solvers.cost_tables import Scope
from commfuse_fx.solvers.eliminate import NoChoiceError
from commfuse_fx.solvers.factor_graph import Table


@dataclass(frozen=True)
class ProgramResult:
    """What an integer program has given.

    states: of each variable. cost: their cost. bound: no choice costs less.
    """

    states: Mapping[int, int]
    cost: float
    bound: float


def by_integer_program(unary: Mapping[int, Table], pairs: Mapping[Scope, Table]) -> ProgramResult:
    """The cheapest states of these variables.

    unary: costs by variable. pairs: costs of the states of two variables.
    Raises NoChoiceError if every choice is forbidden.
    """
    first: dict[int, int] = {}
    costs: list[float] = []
    for number, table in unary.items():
        first[number] = len(costs)
        costs += table.tolist()
    whole = len(costs)
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    right: list[float] = []

    def add(entries: Mapping[int, float], equals: float) -> None:
        rows.extend([len(right)] * len(entries))
        columns.extend(entries)
        values.extend(entries.values())
        right.append(equals)

    for number, table in unary.items():
        add({first[number] + state: 1.0 for state in range(len(table))}, 1.0)
    for scope, table in pairs.items():
        at = np.full(table.shape, -1)
        allowed = np.isfinite(table)
        at[allowed] = np.arange(len(costs), len(costs) + int(allowed.sum()))
        costs += table[allowed].tolist()
        for axis, number in enumerate(scope):
            for state in range(table.shape[axis]):
                own = at.take(state, axis=axis)
                add({first[number] + state: -1.0, **{int(each): 1.0 for each in own[own >= 0]}}, 0.0)
    matrix = coo_array((values, (rows, columns)), shape=(len(right), len(costs)))
    upper = np.where(np.isinf(costs), 0.0, 1.0)
    result = milp(
        np.where(np.isinf(costs), 0.0, costs),
        integrality=np.arange(len(costs)) < whole,
        bounds=Bounds(0.0, upper),
        constraints=LinearConstraint(matrix.tocsr(), right, right),
        options={"mip_rel_gap": 0.0},
    )
    if result.status == 2:
        raise NoChoiceError("every choice is forbidden")
    states = {
        number: int(np.argmax(result.x[first[number] : first[number] + len(table)])) for number, table in unary.items()
    }
    bound = result.mip_dual_bound
    return ProgramResult(states, float(result.fun), -inf if bound is None else float(bound))
