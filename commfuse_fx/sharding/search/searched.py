"""Search the strategies of a step on some groups of mesh axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from commfuse_fx.cost.collective_cost import collective_cost
from commfuse_fx.cost.model import CostModel
from commfuse_fx.ir.program import Program
from commfuse_fx.sharding.dividing.axis import SEARCHED, Axis, Pin
from commfuse_fx.sharding.search.exposure import Exposure
from commfuse_fx.sharding.search.layout_problem import LayoutProblem
from commfuse_fx.sharding.search.placement_costs import PlacementCosts
from commfuse_fx.sharding.search.priced_reads import KnownLayouts
from commfuse_fx.solvers.cheapest_choice import cheapest_choice
from commfuse_fx.solvers.within_budget import within_budget

SEARCH = "search"
"""Topic of notes that say what a search has found."""


def searched(
    program: Program,
    axes: Sequence[Axis],
    costs: CostModel,
    exposed: str = "",
    saving: int = 0,
    known: KnownLayouts | None = None,
) -> list[Axis]:
    """The axes with the strategies and the placements of parameters that a step takes least time with.

    Those that are pinned already are kept. exposed: the part of the time of collectives that counts, as `Exposure`
    writes it. saving: bytes that a rank is to hold less than with the fastest choice.
    known: what other searches of the same compile have found out.
    """
    exposure = Exposure.parse(exposed)
    prices = [PlacementCosts(costs.cluster, _slowest(program, axis, costs), exposure.on(axis.group)) for axis in axes]
    problem = LayoutProblem(program, axes, prices, costs.cluster.device, known)
    solve = partial(cheapest_choice, parts=problem.parts)
    found = solve(problem.graph)
    if saving:
        found = within_budget(
            problem.graph, problem.memory, lambda least, most: max(least, most - saving), found, solve
        )
    counted = f", where {exposed} counts" if exposed else ""
    kept = f" and {problem.memory.cost(found.states) / 2**20:.1f} MiB taken" if saving else ""
    program.note(
        SEARCH,
        ", ".join(axis.group for axis in axes),
        f"{found.cost * 1e3:.3f} ms by the prices of the search{counted}{kept}; {found.solver}, "
        f"proven gap {found.gap:.2%}",
    )
    decided = problem.decisions(found.states)
    return [
        replace(
            axis,
            parameters={
                name: axis.parameters.get(name) or Pin(each, SEARCHED)
                for name, each in decided[axis.group].parameters.items()
            },
            states=decided[axis.group].states,
            blocks=decided[axis.group].blocks,
        )
        for axis in axes
    ]


def _slowest(program: Program, axis: Axis, costs: CostModel) -> tuple[int, ...]:
    """The ranks of a group along this axis, one over the slowest links."""
    groups = costs.cluster.distinct(program.mesh.groups(axis.group))
    return max(groups, key=lambda ranks: collective_cost("all_reduce", 1 << 20, ranks, costs.cluster).seconds)
