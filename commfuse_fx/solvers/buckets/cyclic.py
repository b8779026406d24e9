"""In which order, and in which pieces, to send what the forward of the next step needs.

Numbers only, as in `solvers.cuts`. Sources: priorities and partitioned transfers, P3 (Jayarajan et al., MLSys 2019) and
ByteScheduler (Peng et al., SOSP 2019); earliest deadline first, Horn 1974 ("Some simple scheduling algorithms") and Liu
& Layland 1973.

Why: docs/decisions.md, "Across steps is an order of all_reduces, decided at compile time".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from commfuse_fx.cost.numbers import check_time, check_times
from commfuse_fx.errors import ConfigTypeError, ConfigValueError


@dataclass(frozen=True)
class CyclicMember:
    """One bucket of gradients and the parameters that they update.

    nbytes: its size. ready: index of the backward block after which it may be sent. need: index of the first
    forward block that needs its updated parameters. update: seconds of compute that its update takes.
    """

    nbytes: int
    ready: int
    need: int
    update: float = 0.0


@dataclass(frozen=True)
class CyclicPlan:
    """A training loop in its steady state.

    order: (member, begin byte, end byte) in send order, the same in every step. issue_after: for each of them the
    index of the backward block after which it, and all before it, can be issued. update_order: (member, index of the
    forward block before which its update stands) in the order of execution; each update first waits for its
    transfer. period: seconds per step.
    """

    order: tuple[tuple[int, int, int], ...]
    issue_after: tuple[int, ...]
    update_order: tuple[tuple[int, int], ...]
    period: float


class _Message(NamedTuple):
    """A piece on the stream. `speed`: what part of its speed compute keeps in the meantime."""

    member: int
    start: float
    end: float
    speed: float


def cyclic_plans(
    forward: Sequence[float],
    backward: Sequence[float],
    members: Sequence[CyclicMember],
    alpha: float,
    beta: float,
    piece: int | None,
    host: float = 0.0,
    message: float = 0.0,
) -> tuple[CyclicPlan, ...]:
    """Send orders and places of the updates for a loop in which transfers may run on into the next step's forward: by
    readiness, by need, and by need in pieces.

    forward, backward: seconds per block, in order. members: what is sent. alpha, beta: a message of b bytes takes
    alpha + beta * b seconds. piece: bytes at whose multiples a transfer may give way to a more urgent one, None for
    never. host: seconds of compute that moving one byte takes; compute runs slower by that much while the message is
    on its way (and a message takes at least host * b). message: seconds of compute that handing over one message takes.

    Whenever the stream is free, the piece goes that the next forward needs first, ties by readiness (earliest
    deadline first: Horn 1974, Liu & Layland 1973; for training: P3, Jayarajan et al. 2019, and ByteScheduler, Peng
    et al. 2019). Pieces of one member that follow each other in the resulting order are sent as one message: cutting
    pays only where another one comes between. An update runs before the first block that needs it, or earlier, where
    compute would have to wait for something else, then in the order of arrival. For given arrivals no placement of the
    updates ends the forward sooner: compute rests only when everything left hangs on a transfer that has not arrived.

    Every member is needed by some forward block, so at the start of each backward the stream is empty and every
    update done: each round from there on is the same, and one of them is the steady state.

    The first is never slower than sending whole members in order of readiness and updating all of them before the
    forward. O(n log n) for n pieces. Raises ConfigTypeError or ConfigValueError for bad numbers or block indices.
    """
    check_cyclic(forward, backward, members, alpha, beta, host)
    check_time("message", message)
    if piece is not None and (not isinstance(piece, int) or piece <= 0):
        raise ConfigValueError(f"piece is {piece!r}; pass a positive number of bytes, or None")
    loop = _Loop(forward, backward, members, alpha, beta, host, message)
    whole = [(index, 0, member.nbytes) for index, member in enumerate(members)]
    plans = [loop.plan(sorted(whole, key=lambda one: members[one[0]].ready)), loop.plan(loop.earliest_first(whole))]
    if piece is not None:
        cut = [
            (index, begin, min(begin + piece, member.nbytes))
            for index, member in enumerate(members)
            for begin in range(0, max(member.nbytes, 1), piece)
        ]
        if len(cut) > len(whole):
            plans.append(loop.plan(_joined(loop.earliest_first(cut))))
    return tuple(plans)


def _seconds(nbytes: int, alpha: float, beta: float, host: float) -> float:
    return max(alpha + beta * nbytes, host * nbytes)


def _joined(order: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    joined: list[tuple[int, int, int]] = []
    for member, begin, end in order:
        if joined and joined[-1][0] == member and joined[-1][2] == begin:
            joined[-1] = (member, joined[-1][1], end)
        else:
            joined.append((member, begin, end))
    return joined


@dataclass(frozen=True)
class _Loop:
    """One round of the loop, from the start of a backward to the end of the forward that follows it."""

    forward: Sequence[float]
    backward: Sequence[float]
    members: Sequence[CyclicMember]
    alpha: float
    beta: float
    host: float
    message: float = 0.0

    def earliest_first(self, pieces: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """The pieces in the order in which earliest need first sends them."""

        def urgency(piece: tuple[int, int, int]) -> tuple[int, int, int, int]:
            member = self.members[piece[0]]
            return member.need, member.ready, piece[0], piece[1]

        ranked = sorted(pieces, key=urgency)
        sent, _ = self._send([(self.members[piece[0]].ready, piece) for piece in ranked])
        return [ranked[rank] for rank, _ in sent]

    def plan(self, order: Sequence[tuple[int, int, int]]) -> CyclicPlan:
        """The round with this order, in which a piece is issued only after all before it."""
        issue = list(accumulate((self.members[member].ready for member, _, _ in order), max))
        sent, now = self._with_messages(issue)._send(list(zip(issue, order, strict=True)))
        messages = [message for _, message in sent]
        updates, period = self._forward(messages, now)
        return CyclicPlan(tuple(order), tuple(issue), tuple(updates), period)

    def _with_messages(self, issue: Sequence[int]) -> _Loop:
        """The loop in which each block also hands over what is issued after it."""
        if not self.message:
            return self
        backward = list(self.backward)
        for block in issue:
            backward[block] += self.message
        return replace(self, backward=backward)

    def _send(self, ranked: Sequence[tuple[int, tuple[int, int, int]]]) -> tuple[list[tuple[int, _Message]], float]:
        """The backward: (rank, message) in send order, and when its last block ends.

        ranked: (index of the backward block that releases it, piece). Whenever the stream is free, the released
        piece of the lowest rank goes.
        """
        released: list[list[int]] = [[] for _ in self.backward]
        for rank, (block, _) in enumerate(ranked):
            released[block].append(rank)
        sent: list[tuple[int, _Message]] = []
        waiting: list[int] = []
        now = free = 0.0
        speed = 1.0

        def send(start: float) -> None:
            nonlocal free, speed
            rank = heappop(waiting)
            member, begin, end = ranked[rank][1]
            seconds = _seconds(end - begin, self.alpha, self.beta, self.host)
            speed = max(0.0, 1.0 - self.host * (end - begin) / seconds) if seconds else 1.0
            free = start + seconds
            sent.append((rank, _Message(member, start, free, speed)))

        for block, work in enumerate(self.backward):
            while work > 0:
                if free <= now:
                    if not waiting:
                        now += work
                        break
                    send(now)
                elif work <= (free - now) * speed:
                    now = min(free, now + work / speed)
                    break
                else:
                    work -= (free - now) * speed
                    now = free
            for rank in released[block]:
                heappush(waiting, rank)
        while waiting:
            send(max(free, now))
        return sent, now

    def _forward(self, messages: Sequence[_Message], now: float) -> tuple[list[tuple[int, int]], float]:
        """(member, block before which its update runs) in the order of execution, and when the last block ends."""
        arrival = [0.0] * len(self.members)
        for message in messages:
            arrival[message.member] = message.end
        coming = sorted(range(len(self.members)), key=lambda index: (arrival[index], index))
        needed: list[int] = [0] * len(self.forward)
        for member in self.members:
            needed[member.need] += 1
        updates: list[tuple[int, int]] = []
        urgent: list[tuple[int, float, int]] = []  # what has arrived, by need
        updated = [False] * len(self.members)
        oldest = 0  # of what has arrived, by arrival
        compute = _Compute(messages if self.host else ())
        reached = 0
        for block, work in enumerate(self.forward):
            while True:
                while reached < len(coming) and arrival[coming[reached]] <= now:
                    index = coming[reached]
                    heappush(urgent, (self.members[index].need, arrival[index], index))
                    reached += 1
                if not needed[block]:
                    break
                while urgent and updated[urgent[0][-1]]:
                    heappop(urgent)
                while oldest < reached and updated[coming[oldest]]:
                    oldest += 1
                if not urgent:
                    now = arrival[coming[reached]]
                    continue
                # While what this block needs is still coming, what came first: if everything comes later than
                # expected, that is there all the same.
                index = urgent[0][-1] if urgent[0][0] == block else coming[oldest]
                updated[index] = True
                needed[self.members[index].need] -= 1
                updates.append((index, block))
                now = compute.run(now, self.members[index].update)
            now = compute.run(now, work)
        return updates, now


class _Compute:
    """Compute that is slower while messages are on their way. It is asked in the order of time."""

    def __init__(self, messages: Sequence[_Message]) -> None:
        self.messages = messages
        self.next = 0

    def run(self, now: float, work: float) -> float:
        """When `work` seconds of compute, begun now, have been done."""
        while work > 0 and self.next < len(self.messages):
            message = self.messages[self.next]
            if message.end <= now:
                self.next += 1
            elif now < message.start:
                step = min(work, message.start - now)
                now = message.start if step < work else now + step
                work -= step
            elif work <= (message.end - now) * message.speed:
                return min(message.end, now + work / message.speed)
            else:
                work -= (message.end - now) * message.speed
                now = message.end
        return now + max(work, 0.0)


def check_cyclic(
    forward: Sequence[float],
    backward: Sequence[float],
    members: Sequence[CyclicMember],
    alpha: float,
    beta: float,
    host: float,
) -> None:
    check_times("forward", forward)
    check_times("backward", backward)
    for name, value in (("alpha", alpha), ("beta", beta), ("host", host)):
        check_time(name, value)
    for index, member in enumerate(members):
        if not isinstance(member.nbytes, int):
            raise ConfigTypeError(f"members[{index}].nbytes is {member.nbytes!r}; pass a whole number of bytes")
        check_time(f"members[{index}].nbytes", member.nbytes)
        check_time(f"members[{index}].update", member.update)
        for field, block, blocks in (("ready", member.ready, backward), ("need", member.need, forward)):
            if not isinstance(block, int) or not 0 <= block < len(blocks):
                side = "backward" if field == "ready" else "forward"
                raise ConfigValueError(
                    f"members[{index}].{field} is {block!r}; pass the index of one of the {len(blocks)} {side} blocks"
                )
