"""The cheapest strategies of a step on some of its mesh axes, of which others may be fixed already."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from commfuse_fx.cost.collective_cost import collective_cost
from commfuse_fx.cost.model import CostModel
from commfuse_fx.ir.core.program import Program
from commfuse_fx.sharding.dividing.axis import SEARCHED, Axis, Pin
from commfuse_fx.sharding.dividing.decisions import Decisions
from commfuse_fx.sharding.search.axis_grid import TIME, Objective
from commfuse_fx.sharding.search.exposure import Exposure
from commfuse_fx.sharding.search.layout_problem import LayoutProblem
from commfuse_fx.sharding.search.measured_ops import times_roofline
from commfuse_fx.sharding.search.placement_costs import PlacementCosts
from commfuse_fx.sharding.search.priced_reads import KnownLayouts
from commfuse_fx.solvers.strategies.cheapest_choice import Choice, cheapest_choice
from commfuse_fx.solvers.strategies.factor_graph import FactorGraph
from commfuse_fx.solvers.strategies.within_budget import within_budget

Budget = Callable[[float, float], float]
"""The bytes that may be taken, from the least that is possible and those of the fastest choice."""

LARGE = 1 << 28
"""Bytes of a sum that takes as long as the bandwidth of the links says."""


@dataclass(frozen=True)
class Found:
    """Strategies that a search has found.

    axes: with their strategies and the placements of all parameters.
    cost: seconds of a step. nbytes: what it takes on a rank. solver: what has found them.
    gap: how much more than the cheapest choice they may cost, as a part; None: nothing is proven.
    """

    axes: tuple[Axis, ...]
    cost: float
    nbytes: float
    solver: str
    gap: float | None


class AxisSearch:
    """Searches of one step that count costs alike.

    exposed: the part of the time of collectives that counts, as `Exposure` writes it.
    known: what other searches of the same compile have found out.
    objective: what counts.
    """

    def __init__(
        self,
        program: Program,
        costs: CostModel,
        exposed: str = "",
        known: KnownLayouts | None = None,
        objective: Objective = TIME,
    ) -> None:
        self._program = program
        self._costs = costs
        self._exposed = exposed
        self._exposure = Exposure.parse(exposed)
        self._known = KnownLayouts() if known is None else known
        self._objective = objective
        self._prices: dict[str, PlacementCosts] = {}

    def problem(self, axes: Sequence[Axis], all_axes: Sequence[Axis] = ()) -> LayoutProblem:
        """The choices on these axes together. Pins are kept, and so are the states that an axis has.

        all_axes: these among others, which are searched later: what is pinned on them has to fit as well.
        """
        prices = [self._price(axis.group) for axis in axes]
        device = self._costs.cluster.device
        times = times_roofline(self._program, self._costs)
        known, price_of = self._known, self._price
        return LayoutProblem(self._program, axes, prices, device, known, price_of, self._objective, times, all_axes)

    def cheapest(self, axes: Sequence[Axis], budget: Budget | None = None, all_axes: Sequence[Axis] = ()) -> Found:
        """The cheapest choice on these axes together, of those that take no more memory than a budget says.

        all_axes: as in `problem`.
        """
        problem = self.problem(axes, all_axes)
        parts, earlier = problem.parts, self._known.choices_of(problem.states)

        def solve(graph: FactorGraph) -> Choice:
            found = cheapest_choice(graph, parts, earlier=earlier)
            if found.shifts is not None:
                earlier.append(replace(found, certificate=None))
            return found

        found = solve(problem.graph)
        if budget is not None:
            found = within_budget(problem.graph, problem.memory, budget, found, solve)
        decided = problem.decisions(found.states)
        nbytes = problem.memory.cost(found.states)
        return Found(tuple(_with(axis, decided) for axis in axes), found.cost, nbytes, found.solver, found.gap)

    def with_work(self, times: float) -> AxisSearch:
        """The same, with compute that counts so many times as much."""
        objective = replace(self._objective, work=times * self._objective.work)
        return AxisSearch(self._program, self._costs, self._exposed, self._known, objective)

    def fastest_first(self, axes: Sequence[Axis]) -> list[Axis]:
        """The axes by the time of a large sum; of equal ones the inner axis first."""

        def seconds(axis: Axis) -> float:
            return _sum_seconds(_slowest(self._program, axis.group, self._costs), self._costs, LARGE)

        inner_first = [*axes]
        inner_first.reverse()
        return sorted(inner_first, key=seconds)

    def _price(self, group: str) -> PlacementCosts:
        if group not in self._prices:
            ranks = _slowest(self._program, group, self._costs)
            self._prices[group] = PlacementCosts(self._costs.cluster, ranks, self._exposure.on(group))
        return self._prices[group]


def _with(axis: Axis, decided: Mapping[str, Decisions]) -> Axis:
    own = decided[axis.group]
    pins = {name: axis.parameters.get(name) or Pin(each, SEARCHED) for name, each in own.parameters.items()}
    return replace(axis, parameters=pins, states=own.states, blocks=own.blocks)


def _slowest(program: Program, group: str, costs: CostModel) -> tuple[int, ...]:
    """The ranks of a group along these axes, one over the slowest links."""
    groups = costs.cluster.distinct(program.mesh.groups(group))
    return max(groups, key=lambda ranks: _sum_seconds(ranks, costs))


def _sum_seconds(ranks: tuple[int, ...], costs: CostModel, nbytes: int = 1 << 20) -> float:
    return collective_cost("all_reduce", nbytes, ranks, costs.cluster).seconds
