"""What a search has chosen from, and what shows how far its choice is from the cheapest one, for anybody to check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commfuse_fx.sharding.dividing.axis import Axis
from commfuse_fx.sharding.search.axis_search import AxisSearch, Found
from commfuse_fx.sharding.search.layout_problem import LayoutProblem
from commfuse_fx.solvers.strategies.certificate import Certificate
from commfuse_fx.solvers.strategies.cheapest_choice import cheapest_choice
from commfuse_fx.solvers.strategies.factor_graph import FactorGraph
from commfuse_fx.solvers.strategies.level_costs import Levelled

WALKS = 12
"""Walks there and back for a bound, over variables that lie alike together and then over all."""


@dataclass(frozen=True)
class SearchProof:
    """A proof has all that it takes to check the cost of searched strategies, and a bound below all others.

    axes: the mesh axes that were searched together.
    graph: a variable for each op and parameter, with the seconds of each of its strategies; for each value the seconds
        of changes of its layout, by the strategies of who makes it and of who reads it; and those that are paid once,
        however many read it.
    states: the strategy of each variable that was chosen.
    certificate: how seconds are shifted between the tables of the graph. The sum of the least entries is then `bound`.
    """

    axes: tuple[str, ...]
    graph: FactorGraph
    states: tuple[int, ...]
    certificate: Certificate

    @property
    def cost(self) -> float:
        """Seconds of the chosen strategies, by the prices of the search."""
        return self.graph.cost(self.states)

    @property
    def bound(self) -> float:
        """Seconds. No choice of strategies costs less."""
        return self.certificate.bound(self.graph)

    @property
    def gap(self) -> float:
        """How much less another choice may cost at the most, as a part of the cost."""
        return max(0.0, 1 - self.bound / self.cost) if self.cost else 0.0


class SearchProofs(list[SearchProof]):
    """Those of the searches of a compile that keeps this list."""


def prove(search: AxisSearch, axes: Sequence[Axis], found: Found) -> SearchProof:
    """The proof for strategies that were found on these axes."""
    free, fixed = search.problem(axes), search.problem(found.axes)
    levelled = Levelled(free.graph)
    levelled.walk(WALKS)
    levelled.take_apart()
    levelled.walk(WALKS)
    chosen = _chosen(free, fixed)
    return SearchProof(tuple(axis.group for axis in axes), free.graph, chosen, levelled.certificate())


def _chosen(free: LayoutProblem, fixed: LayoutProblem) -> tuple[int, ...]:
    """The states of a problem that are left in one where everything is decided."""
    left = cheapest_choice(fixed.graph).states
    states = (own[number] for own, number in zip(fixed.states, left, strict=True))
    return tuple(every.index(state) for every, state in zip(free.states, states, strict=True))
