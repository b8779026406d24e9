"""The cheapest choice in a graph of variables of which another sum stays within a budget, by a price on that sum.

Each price has a choice for which costs and priced amounts are least together. The choices of all prices are the corners
of the lower convex hull of all choices, drawn as points of amount and cost. The search walks along the hull: the line
through the corner that is too large and the one that fits has a price, for which there is a corner below the line, or
none, and then the corner that fits is the cheapest one.

Source: Everett, "Generalized Lagrange multiplier method for solving problems of optimum allocation of resources"
(Operations Research 11, 1963).

Why: docs/decisions.md, "A search under a memory limit saves what a plan is too large by".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from commfuse_fx.solvers.strategies.cheapest_choice import Choice, cheapest_choice
from commfuse_fx.solvers.strategies.factor_graph import FactorGraph

HIGH = 1e4
"""A price at which the amount counts so many times as much as costs may: the least amount is found up to this part."""

EQUAL = 1e-9
"""Relative difference below which two sums count as equal."""


def within_budget(
    costs: FactorGraph,
    amounts: FactorGraph,
    budget_of: Callable[[float, float], float],
    cheapest: Choice,
    solve: Callable[[FactorGraph], Choice] = cheapest_choice,
) -> Choice:
    """The cheapest corner whose amount is within a budget; the one with the least amount where none is.

    costs, amounts: graphs of the same variables.
    budget_of: the budget, from the least amount and that of the cheapest choice.
    cheapest: the cheapest choice. The result's bound is that of all choices within the budget.
    solve: finds the cheapest choice of a graph of these variables, or one with a bound. Its errors pass unchanged.
    """
    most = amounts.cost(cheapest.states)
    if not most:
        return cheapest
    above, above_amount = cheapest, most
    price = HIGH * costs.most() / most
    below, bound = _at(costs, amounts, price, solve)
    below_amount = amounts.cost(below.states)
    budget = budget_of(below_amount, most)
    bounds = [cheapest.bound, bound - price * budget]
    while above_amount > budget and above.cost < below.cost and below_amount < above_amount:
        price = (below.cost - above.cost) / (above_amount - below_amount)
        found, bound = _at(costs, amounts, price, solve)
        bounds.append(bound - price * budget)
        amount = amounts.cost(found.states)
        total = found.cost + price * amount
        if total >= (above.cost + price * above_amount) * (1 - EQUAL):
            break  # on the line itself
        if amount <= budget:
            below, below_amount = found, amount
        else:
            above, above_amount = found, amount
    # Choices that are not exact may have more of both than another one.
    is_less = (above_amount, above.cost) < (below_amount, below.cost)
    if is_less or (above_amount <= budget and above.cost <= below.cost):
        below = above
    return replace(below, bound=min(below.cost, max(bounds)))


def _at(
    costs: FactorGraph, amounts: FactorGraph, price: float, solve: Callable[[FactorGraph], Choice]
) -> tuple[Choice, float]:
    """The choice at a price with its own cost, and what no choice is below with priced amounts."""
    found = solve(costs.plus(amounts, price))
    return replace(found, cost=costs.cost(found.states)), found.bound
