"""Leave the ranks time to vote before the first collective.

Ranks vote on every step, and read the votes before its first collective. Numbers of looked-up rows could leave as soon
as a step begins, but are not needed before its backward. In the first moments of a step the wire may still carry what
the step before has left, and the votes come behind that: a step that sends the numbers at once waits for them.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, takewhile

from torch import fx

from commfuse_fx.ir.core.collectives import is_start, role_of, wait_of
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.order import reorder
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import NO_PRICES, PassContext, PricedPass, Situation


@dataclass(frozen=True)
class VoteFirst(PricedPass):
    """Where numbers of rows are the first that a step sends, they start in the middle of the time to their wait: one
    half is for the votes, the other one for them. Bitwise neutral."""

    name = "vote_first"
    numerics = "bitwise"
    needs_sizes = True
    requires = ("scheduled",)

    @classmethod
    def when(cls, situation: Situation) -> VoteFirst | None:
        is_resent = situation.variant.get("resent", False)
        return cls() if is_resent and situation.by_cost and situation.schedules else None

    def __call__(self, program: Program, context: PassContext = NO_PRICES) -> bool:
        nodes = list(program.graph.nodes)
        sending = [node for node in nodes if is_start(node) or info(node).sends]
        held = dict.fromkeys(takewhile(_sends_numbers, sending))
        if not held:
            return False
        place = {node: i for i, node in enumerate(nodes)}
        clock = list(accumulate((context.costs.compute_seconds(node) for node in nodes), initial=0.0))
        needed = min(place[wait_of(start)] for start in held)
        begin = bisect_left(clock, clock[needed] / 2)
        if len(sending) > len(held):
            begin = min(begin, place[sending[len(held)]])
        if begin <= max(place[start] for start in held):
            return False
        before, after = ([node for node in part if node not in held] for part in (nodes[:begin], nodes[begin:]))
        reorder(program.graph, [*before, *held, *after])
        return True


def _sends_numbers(node: fx.Node) -> bool:
    return role_of(node) == "rows"
