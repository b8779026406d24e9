"""Why a collective is exposed: what would have had to be otherwise for its wait to be free."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from torch import fx

from commfuse_fx.cost.deferred import is_deferred
from commfuse_fx.cost.rounds import Flown, Played
from commfuse_fx.ir.collectives import is_wait
from commfuse_fx.ir.dependence import Dependence
from commfuse_fx.ir.meta import info
from commfuse_fx.ir.program import Program

MEMORY_CAP = "memory cap"
"""Topic of a program's note about a collective that was moved to keep the step's memory down."""

# A collective was waited for "at once" when less than this part of its exposure was computed meanwhile.
_AT_ONCE = 0.01


@dataclass(frozen=True)
class _Leg:
    """One piece on the wire."""

    start: fx.Node
    issued: float
    begin: float
    end: float


class Reasons:
    """Explains the exposed collectives of what was played.

    The exposed seconds of a collective have three parts: it stood in the queue behind others of its group; compute
    that does not need it comes only after its wait; and the rest, which nothing in this step could have hidden.
    The largest part is the reason. Updates of parameters come after all waits and count as nobody's cover.
    """

    def __init__(self, program: Program, played: Played, dependence: Dependence) -> None:
        self.played = played
        self.dependence = dependence
        self.capped = dict.fromkeys(note.subject for note in program.notes if note.topic == MEMORY_CAP)
        self.position = {node: i for i, node in enumerate(played.order)}
        self.waits = {node.args[0]: node for node in played.order if is_wait(node)}
        self.legs = self._legs()
        self.streams = self._streams()
        self.later = self._independent_later()

    def of(self, start: fx.Node) -> str:
        """ "no independent compute left", "FIFO behind X (ms)", "dependency on Y", "memory cap"; "" if not exposed.

        Y is the node whose result is sent; where compute that could have covered the collective comes too late,
        Y is the node that stands first after the wait.
        """
        flown = self.played.flown[start]
        exposed = flown.wait_left - flown.wait_entered
        if exposed <= 0:
            return ""
        if info(start).name in self.capped:
            return MEMORY_CAP
        behind = self._queued_behind(start, flown)
        queued = min(sum(behind.values()), exposed)
        coverable = min(exposed - queued, self.later.get(start, 0.0))
        rest = exposed - queued - coverable
        if queued >= max(coverable, rest):
            first = max(behind, key=behind.__getitem__)
            return f"FIFO behind {info(first).name} ({_ms(behind[first])})"
        if coverable > rest:
            return (
                f"dependency on {info(self._first_user(start)).name}, which needs it before "
                f"{_ms(self.later[start])} of independent compute"
            )
        last = self.legs[flown.handles[-1]]
        if flown.wait_entered - last.issued <= _AT_ONCE * exposed:
            return f"dependency on {info(self._producer(start)).name}"
        return "no independent compute left"

    def _legs(self) -> dict[int, _Leg]:
        legs: dict[int, _Leg] = {}
        for start, flown in self.played.flown.items():
            for handle in flown.handles:
                legs[handle] = _Leg(start, *self.played.engine.times(handle))
        return legs

    def _streams(self) -> dict[str, list[_Leg]]:
        """The legs of each stream in the order in which they were on the wire."""
        streams: dict[str, list[_Leg]] = {}
        for leg in self.legs.values():
            streams.setdefault(_stream(leg.start), []).append(leg)
        return {name: sorted(legs, key=lambda leg: (leg.end, leg.begin)) for name, legs in streams.items()}

    def _queued_behind(self, start: fx.Node, flown: Flown) -> dict[fx.Node, float]:
        """Seconds for which the last piece of a collective stood behind each other one of its stream."""
        mine = self.legs[flown.handles[-1]]
        stream = self.streams[_stream(start)]
        found: dict[fx.Node, float] = {}
        # One after another: those that ended before it was issued stand first, those that began after it last.
        for leg in stream[bisect_right(stream, mine.issued, key=lambda leg: leg.end) :]:
            if leg.begin >= mine.begin:
                break
            if leg.start is not start:
                overlap = min(leg.end, mine.begin) - max(leg.begin, mine.issued)
                found[leg.start] = found.get(leg.start, 0.0) + overlap
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


def _stream(start: fx.Node) -> str:
    details = info(start).collective
    assert details is not None
    return details.group


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
