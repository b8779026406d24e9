"""Why a collective is exposed: what would have had to be otherwise for its wait to be free."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice

from torch import fx

from commfuse_fx.cost.transfer import Transfer
from commfuse_fx.ir.core.collectives import is_wait
from commfuse_fx.ir.core.dependence import Dependence
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.deferred import is_deferred
from commfuse_fx.simulate.rounds import Played

MEMORY_CAP = "memory cap"
"""Topic of a program's note about a collective that was moved to keep the step's memory down."""

# A collective was waited for "at once" when less than this part of its exposure was computed meanwhile.
_AT_ONCE = 0.01

# Of those that a collective stands behind, the longest of this many is named: thousands may stand before each of
# thousands.
_NEAREST = 100


@dataclass(frozen=True)
class _Leg:
    """One piece on the wire. moving, moved: from when to when it loaded its links."""

    start: fx.Node
    transfer: Transfer
    issued: float
    begin: float
    moving: float
    moved: float
    end: float

    def competes_with(self, other: _Leg) -> bool:
        """Whether the two get less of the wire while both move."""
        mine, its = self.transfer, other.transfer
        return mine.stream == its.stream or any(link in its.links for link in mine.links)


class Reasons:
    """Explains the exposed collectives of what was played.

    The exposed seconds of a collective have four parts: it stood in the queue behind others of its group; it moved at
    a part of its speed beside another one; compute that does not need it comes only after its wait; and the rest, which
    nothing in this step could have hidden. The largest part is the reason. Updates of parameters come after all waits
    and count as nobody's cover.
    """

    def __init__(self, program: Program, played: Played, dependence: Dependence) -> None:
        self.played = played
        self.dependence = dependence
        self.capped = dict.fromkeys(note.subject for note in program.notes if note.topic == MEMORY_CAP)
        self.position = {node: i for i, node in enumerate(played.order)}
        self.waits = {node.args[0]: node for node in played.order if is_wait(node)}
        self.legs = self._legs()
        self.by_begin = sorted(self.legs.values(), key=lambda leg: (leg.begin, leg.end))
        self.latest_ends = list(accumulate([leg.end for leg in self.by_begin], max))
        self.later = self._independent_later()

    def of(self, start: fx.Node) -> str:
        """ "no independent compute left", "FIFO behind X (ms)", "shares the wire with X (ms)", "dependency on Y",
        "memory cap"; "" if not exposed.

        Y is the node whose result is sent; where compute that could have covered the collective comes too late,
        Y is the node that stands first after the wait.
        """
        flown = self.played.flown[start]
        exposed = flown.wait_left - flown.wait_entered
        if exposed <= 0:
            return ""
        if info(start).name in self.capped:
            return MEMORY_CAP
        last = self.legs[flown.handles[-1]]
        behind, beside = self._ahead_of(last), self._shared_with(last)
        queued = min(self._queued(last), exposed) if behind else 0.0
        shared = min(sum(beside.values()), exposed - queued)
        coverable = min(exposed - queued - shared, self.later.get(start, 0.0))
        rest = exposed - queued - shared - coverable
        if queued >= max(shared, coverable, rest):
            return f"FIFO behind {_longest(behind)}"
        if shared >= max(coverable, rest):
            return f"shares the wire with {_longest(beside)}"
        if coverable > rest:
            return (
                f"dependency on {info(self._first_user(start)).name}, which needs it before "
                f"{_ms(self.later[start])} of independent compute"
            )
        if flown.wait_entered - last.issued <= _AT_ONCE * exposed:
            return f"dependency on {info(self._producer(start)).name}"
        return "no independent compute left"

    def _legs(self) -> dict[int, _Leg]:
        legs: dict[int, _Leg] = {}
        for start, flown in self.played.flown.items():
            for handle in flown.handles:
                issued, begin, end = self.played.engine.times(handle)
                transfer, moving, moved = self.played.engine.moving(handle)
                legs[handle] = _Leg(start, transfer, issued, begin, moving, moved, end)
        return legs

    def _during(self, begin: float, end: float) -> Iterator[_Leg]:
        """What was on the wire at any time between these two."""
        for i in range(bisect_left(self.by_begin, end, key=lambda leg: leg.begin) - 1, -1, -1):
            if self.latest_ends[i] <= begin:
                return
            if self.by_begin[i].end > begin:
                yield self.by_begin[i]

    def _queued(self, mine: _Leg) -> float:
        """Seconds for which a piece stood in the queue, less those in which its own collective kept a lane."""
        own = [self.legs[handle] for handle in self.played.flown[mine.start].handles]
        kept = sum(_overlap(leg.begin, leg.end, mine.issued, mine.begin) for leg in own)
        return max(mine.begin - mine.issued - kept / mine.transfer.lanes, 0.0)

    def _ahead_of(self, mine: _Leg) -> dict[fx.Node, float]:
        """Seconds for which a piece stood behind each other collective of its stream, of the nearest ones."""
        during = self._during(mine.issued, mine.begin)
        stream = mine.transfer.stream
        others = (leg for leg in during if leg.transfer.stream == stream and leg.start is not mine.start)
        found: dict[fx.Node, float] = {}
        for leg in islice(others, _NEAREST):
            overlap = _overlap(leg.begin, leg.end, mine.issued, mine.begin)
            found[leg.start] = found.get(leg.start, 0.0) + overlap
        return found

    def _shared_with(self, mine: _Leg) -> dict[fx.Node, float]:
        """Seconds that a piece lost to each other collective that moved beside it: of two, each has half the wire."""
        found: dict[fx.Node, float] = {}
        for leg in self._during(mine.moving, mine.moved):
            overlap = _overlap(leg.moving, leg.moved, mine.moving, mine.moved)
            if overlap and leg.start is not mine.start and leg.competes_with(mine):
                found[leg.start] = found.get(leg.start, 0.0) + overlap / 2
        return found

    def _producer(self, start: fx.Node) -> fx.Node:
        """The node that computed last of those whose results a collective sends."""
        position = self.position
        seen: dict[fx.Node, None] = {}
        pending = [start]
        best = start
        while pending:
            for other in self.dependence.direct[pending.pop()]:
                if other in seen:
                    continue
                seen[other] = None
                if other in self.played.seconds or is_wait(other):
                    if best is start or position[other] > position[best]:
                        best = other
                elif other.op == "call_function":
                    pending.append(other)
        return best

    def _first_user(self, start: fx.Node) -> fx.Node:
        """The first node that computes after the wait."""
        order = self.played.order
        following = range(self.position[self.waits[start]] + 1, len(order))
        return next((order[i] for i in following if order[i] in self.played.seconds), order[-1])

    def _independent_later(self) -> dict[fx.Node, float]:
        """For each exposed collective the seconds of compute after its wait that do not depend on it."""
        bits: dict[fx.Node, int] = {}  # start -> its bit
        for start, flown in self.played.flown.items():
            # What the step after reads is not among the dependences of one step.
            if flown.wait_left > flown.wait_entered and not is_deferred(self.waits[start]):
                bits[start] = 1 << len(bits)
        if not bits:
            return {}
        needs: dict[fx.Node, int] = {}  # node -> the collectives that it depends on
        waited = 0
        free: dict[int, float] = {}  # collectives waited for that a node does not need -> seconds of such nodes
        for node in self.played.order:
            mask = 0
            for other in self.dependence.direct[node]:
                mask |= needs.get(other, 0)
            if is_wait(node):
                own = bits.get(node.args[0], 0)  # type: ignore[arg-type]
                mask |= own
                waited |= own
            needs[node] = mask
            cost = self.played.seconds.get(node)
            if cost and info(node).phase != "update" and waited & ~mask:
                free[waited & ~mask] = free.get(waited & ~mask, 0.0) + cost
        return {start: sum(cost for mask, cost in free.items() if mask & bit) for start, bit in bits.items()}


def _overlap(begin: float, end: float, other_begin: float, other_end: float) -> float:
    return max(min(end, other_end) - max(begin, other_begin), 0.0)


def _longest(seconds: dict[fx.Node, float]) -> str:
    """Of seconds per collective: the one with most, and how many."""
    first = max(seconds, key=seconds.__getitem__)
    return f"{info(first).name} ({_ms(seconds[first])})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
