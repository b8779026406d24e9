"""Send first what is needed first.

A stream carries one message at a time, in the order of issue. Where a result that is needed soon becomes ready behind
a large one that is not, the large one is held back: its start moves behind the urgent one's. (Priorities: Jayarajan et
al., "Priority-based Parameter Propagation", 2019; Peng et al., "ByteScheduler", 2019.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import fx

from commfuse_fx.ir.core.collectives import collective_of, is_start, wait_of
from commfuse_fx.ir.core.dependence import Dependence
from commfuse_fx.ir.core.order import stable_sort
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import NO_PRICES, PassContext, PricedPass, Situation
from commfuse_fx.solvers.buckets.compute_program import Item
from commfuse_fx.solvers.buckets.consumers import optimal_plan


@dataclass(frozen=True)
class IssueByNeed(PricedPass):
    """For a graph in which starts stand where their inputs are ready and waits where results are used.

    Per stream the order of issue is the one with which compute ends first (`optimal_plan`: exact for up to 8
    collectives, else searched). Compute and waits keep their order. Bitwise neutral.
    """

    name = "issue_by_need"
    numerics = "bitwise"
    needs_sizes = True
    requires = ("averaged",)

    @classmethod
    def when(cls, situation: Situation) -> IssueByNeed | None:
        return None  # a part of the schedule

    def __call__(self, program: Program, context: PassContext = NO_PRICES) -> bool:
        place = {node: i for i, node in enumerate(program.graph.nodes)}
        seconds = [0.0 if is_start(node) else context.costs.compute_seconds(node) for node in place]
        clock = list(accumulate(seconds, initial=0.0))
        wanted = []
        for starts in _streams(program):
            needs = [place[wait_of(start)] for start in starts]
            if needs != sorted(needs):  # else first come, first served is best
                wire = [context.costs.cost_of(start, mesh=program.mesh).seconds for start in starts]
                order = _order(starts, wire, place, clock)
                if order != starts:
                    wanted.append(order)
        if not wanted:
            return False
        before = Dependence(program.graph, program.aliases()).direct
        position = {node: float(i) for node, i in place.items()}
        for order in wanted:
            for first, then in pairwise(order):
                before[then] = [*before[then], first]
                position[then] = max(position[then], position[first])
        stable_sort(program.graph, position, before)
        return True


def _order(
    starts: Sequence[fx.Node], seconds: Sequence[float], place: dict[fx.Node, int], clock: Sequence[float]
) -> list[fx.Node]:
    """seconds: that each takes on the wire."""
    events: list[tuple[int, Item]] = []
    for i, start in enumerate(starts):
        events += [(place[start], ("ready", i)), (place[wait_of(start)], ("need", i))]
    items: list[Item] = []
    reached = 0
    for at, item in sorted(events):
        items += [("run", clock[at] - clock[reached]), item]
        reached = at
    items.append(("run", clock[-1] - clock[reached]))
    plan = optimal_plan(items, seconds, alpha=0.0, beta=1.0, merge=False)
    return [starts[i] for (i,) in plan.buckets]


def _streams(program: Program) -> list[list[fx.Node]]:
    """Collectives of one group, in the order of issue."""
    found: dict[str, list[fx.Node]] = {}
    for start in program.collectives():
        details = collective_of(start)
        found.setdefault(details.group, []).append(start)
    return list(found.values())
