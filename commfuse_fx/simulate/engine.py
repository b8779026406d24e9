"""Plays transfers and computing against each other in time. Knows no graph.

One thread computes. Each stream carries one transfer at a time, or two that share it evenly, in the order of issue, as
backends do with the collectives of one group. Time is fluid: between two events every rate is constant, and at an event
(a transfer begins, ends its latency or ends) the rates are worked out anew.

Why: docs/decisions.md, "Bursts and busy latencies are figures of a level".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf

from commfuse_fx.cost.transfer import Transfer

CORE_SHARE = 0.5
"""The part of the core that a backend's threads get at most while the step computes: two threads, one half each."""

_SPENT = 1e-9
"""Seconds of an allowance that count as nothing: what rounding leaves of it."""


class _Flight:
    """A transfer that was issued.

    left: seconds that it has still to move. waiting, behind: seconds that the backend's threads have still to wait for
    the core while the transfer moves, and when it has. rests, moves, waits: when its latency, moving and `waiting` are
    over if no rate changes; inf while they do not pass. moving, moved: when it began and ceased to load its links.
    share: of its most crowded link. demand: the part of the core that moving at rate 1 takes, as things are.
    """

    __slots__ = (
        "begin",
        "behind",
        "demand",
        "end",
        "issued",
        "left",
        "loading",
        "moved",
        "moves",
        "moving",
        "rate",
        "rests",
        "share",
        "transfer",
        "waiting",
        "waits",
    )

    def __init__(self, transfer: Transfer, issued: float) -> None:
        self.transfer = transfer
        self.issued = issued
        self.begin = self.moving = self.moved = self.end = inf
        self.rests = self.moves = self.waits = inf
        self.loading = False
        self.left = transfer.transfer
        self.behind = (transfer.slowed - 1.0) * transfer.last
        self.waiting = (transfer.slowed - 1.0) * (transfer.latency - transfer.last)
        self.rate = 0.0
        self.share = 1.0
        self.demand = transfer.host / transfer.transfer if transfer.transfer else 0.0

    @property
    def is_resting(self) -> bool:
        """Whether its latency passes, which nothing can change."""
        return self.rests < inf

    def go_on(self, now: float) -> bool:
        """Begin with what comes next if what came before is over. Whether the transfer has ended."""
        if self.is_resting:
            return False
        if self.left and not self.loading:
            self.loading, self.moving = True, now
        if self.loading or self.waiting:
            return False
        self.waiting, self.behind = self.behind, 0.0
        return not self.waiting

    def reach(self, now: float, event: float) -> bool:
        """Let what is over at this event be over. Whether the transfer has ended."""
        if self.rests <= event:
            self.rests = inf
        if self.moves <= event:
            self.loading, self.left, self.moves, self.moved = False, 0.0, inf, now
        if self.waits <= event:
            self.waiting, self.waits = 0.0, inf
        return self.go_on(now)


class _Allowance:
    """What a link may carry in a burst. left, most: seconds of transfer. load: how much it moves per second."""

    __slots__ = ("left", "load", "most")

    def __init__(self, most: float) -> None:
        self.left = self.most = most
        self.load = 0.0


class Engine:
    """A clock, one compute thread and any number of streams.

    Links, and streams, are divided evenly between the transfers that load them: a transfer moves at the rate of the
    most crowded one. A transfer with host time takes compute time away while it moves. Backend and step share the
    core half and half where there is not enough for both; where the step waits, the backend has it all. A link with
    bursts begins with its whole allowance, spends it where it moves more than its rate, and earns it back otherwise.
    """

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the start."""
        self._flights: list[_Flight] = []
        self._queues: dict[str, deque[_Flight]] = {}
        self._active: list[_Flight] = []
        self._allowances: dict[str, _Allowance] = {}
        self._slowed = False  # whether computing slows any latency
        self._held_back = False  # whether it slows any transfer
        self._computing = True
        self._speed = 1.0  # of computing
        self._next = inf  # the next event
        self._since = 0.0  # up to here `left` is right

    def run(self, seconds: float) -> tuple[float, float]:
        """Compute for this long, and longer where transfers take a part of the core. Returns (begin, end)."""
        begin = self.now
        if not self._active:
            self.now = begin + seconds
            return begin, self.now
        if not self._computing:
            self._plan(computing=True)
        while True:
            end = self.now + seconds / self._speed
            if end <= self._next:
                self.now = end
                return begin, end
            seconds = max(seconds - (self._next - self.now) * self._speed, 0.0)
            self._reach_next()

    def run_each(self, parts: Iterable[float]) -> None:
        """`run` for each of these times, to the same rounding."""
        for seconds in parts:
            if not self._active:
                self.now += seconds
            elif self._computing and (end := self.now + seconds / self._speed) <= self._next:
                self.now = end
            else:
                self.run(seconds)

    def issue(self, transfer: Transfer) -> int:
        """Put a transfer behind those of its stream. Takes no compute time. Returns its handle."""
        self._settle()  # before it flies: no time before its issue counts for it
        flight = _Flight(transfer, self.now)
        self._flights.append(flight)
        if transfer.burst:
            for link in transfer.links:
                self._allowances.setdefault(link, _Allowance(transfer.burst))
        self._slowed = self._slowed or transfer.slowed > 1.0
        self._held_back = self._held_back or transfer.busy_speed < 1.0
        queue = self._queues.setdefault(transfer.stream, deque())
        queue.append(flight)
        if len(queue) <= transfer.lanes:
            self._serve(queue)
            self._plan(self._computing)
        return len(self._flights) - 1

    def wait(self, handle: int) -> tuple[float, float]:
        """Stand still until a transfer has ended. Returns when the wait was (entered, left)."""
        entered = self.now
        flight = self._flights[handle]
        while flight.end == inf:
            if self._computing:
                self._plan(computing=False)
            self._reach_next()
        return entered, self.now

    def rest(self, until: float) -> None:
        """Stand still until this time, if it is still to come."""
        while self.now < until:
            if self._computing:
                self._plan(computing=False)
            if self._next > until:
                self.now = until
            else:
                self._reach_next()

    def drain(self) -> float:
        """Stand still until nothing is on the wire. Returns the time."""
        for handle in range(len(self._flights) - 1, -1, -1):
            if self._active:
                self.wait(handle)
        return self.now

    def times(self, handle: int) -> tuple[float, float, float]:
        """When a transfer was issued, began and ended; inf for what has not happened yet."""
        flight = self._flights[handle]
        return flight.issued, flight.begin, flight.end

    def moving(self, handle: int) -> tuple[Transfer, float, float]:
        """A transfer, and from when to when it loaded its links; inf for what has not happened."""
        flight = self._flights[handle]
        return flight.transfer, flight.moving, flight.moved

    def outstanding(self) -> dict[str, float]:
        """Seconds that what is in each stream that is not empty has still to go, one after the other."""
        self._settle()
        return {stream: sum(self._left(flight) for flight in queue) for stream, queue in self._queues.items() if queue}

    def _left(self, flight: _Flight) -> float:
        """Seconds that it has still to go alone, waiting for the core included."""
        if flight.begin == inf:
            latency = flight.transfer.latency
        else:
            latency = flight.rests - self.now if flight.is_resting else 0.0
        return latency + flight.left + flight.waiting + flight.behind

    def allowances(self) -> dict[str, float]:
        """Seconds of transfer that each link with bursts may still carry at once."""
        self._settle()
        return {f"allowance of {link}": allowance.left for link, allowance in self._allowances.items()}

    def _serve(self, queue: deque[_Flight]) -> None:
        """Begin with the transfers that this stream has room for; one that takes no time at all ends at once."""
        place = 0
        while place < len(queue) and place < queue[place].transfer.lanes:
            flight = queue[place]
            if flight.begin == inf:
                flight.begin = self.now
                if flight.transfer.latency:
                    flight.rests = self.now + flight.transfer.latency
                if flight.go_on(self.now):
                    flight.end = self.now
                    del queue[place]
                    continue
                self._active.append(flight)
            place += 1

    def _let_wait(self, computing: bool) -> None:
        """Work out until when the backend's threads wait for the core: not where the step stands still."""
        for flight in self._active:
            if flight.waiting and not flight.is_resting:
                flight.waits = self.now + (flight.waiting if computing else 0.0)

    def _reach_next(self) -> None:
        """Go on to the next event and let it happen."""
        self.now = max(self.now, self._next)
        self._settle()
        event = self._next
        over = [each for each in self._active if each.moves <= event or each.rests <= event or each.waits <= event]
        for flight in over:
            if not flight.reach(self.now, event):
                continue
            flight.end = self.now
            self._active.remove(flight)
            queue = self._queues[flight.transfer.stream]
            queue.remove(flight)
            self._serve(queue)
        self._plan(self._computing)

    def _settle(self) -> None:
        """Account for what has moved since the rates were last worked out."""
        passed = self.now - self._since
        if not passed:
            return
        for flight in self._active:
            if flight.loading:
                flight.left = max(flight.left - flight.rate * passed, 0.0)
            if flight.waits < inf and self._computing:
                flight.waiting = max(flight.waiting - passed, 0.0)
        for allowance in self._allowances.values():
            left = allowance.left + (1.0 - allowance.load) * passed
            allowance.left = min(left, allowance.most) if left > _SPENT else 0.0
        self._since = self.now

    def _plan(self, computing: bool) -> None:
        """Work out all rates from now on, and the next event."""
        self._settle()
        self._computing = computing
        loading = [flight for flight in self._active if flight.loading]
        demand = self._share_links(loading)
        if self._allowances:
            demand = self._boost(loading)
        if computing and self._held_back:
            demand = self._hold_back(loading)
        share = CORE_SHARE if computing else 1.0
        scale = 1.0 if demand <= share else share / demand
        for flight in loading:
            if flight.demand:
                flight.rate *= scale
            flight.moves = self.now + flight.left / flight.rate
        self._speed = 1.0 - min(demand, share) if computing else 1.0
        if self._slowed:
            self._let_wait(computing)
        self._next = min([min(each.rests, each.moves, each.waits) for each in self._active], default=inf)
        if self._allowances:
            self._next = min(self._next, self._spend(loading))

    def _boost(self, loading: list[_Flight]) -> float:
        """Raise the rates of what moves in a burst. Returns the part of the core that moving then takes."""
        for flight in loading:
            transfer = flight.transfer
            flight.demand = transfer.host / transfer.transfer
            if transfer.burst and all(self._allowances[link].left for link in transfer.links):
                flight.rate *= transfer.boost
                # A core is not busy for longer than what it does takes.
                flight.demand = min(flight.demand, 1.0 / transfer.boost)
        return sum([flight.rate * flight.demand for flight in loading])

    @staticmethod
    def _hold_back(loading: list[_Flight]) -> float:
        """Set the rates that computing leaves. Returns the part of the core that moving then takes."""
        for flight in loading:
            flight.rate = min(flight.rate, flight.share * flight.transfer.busy_speed)
        return sum([flight.rate * flight.demand for flight in loading])

    def _spend(self, loading: list[_Flight]) -> float:
        """Note what each link with bursts moves from now on. Returns when the first allowance will be spent."""
        spent = inf
        for link, allowance in self._allowances.items():
            allowance.load = sum([flight.rate for flight in loading if link in flight.transfer.links])
            if allowance.left and allowance.load > 1.0:
                spent = min(spent, self.now + allowance.left / (allowance.load - 1.0))
        return spent

    @staticmethod
    def _share_links(loading: list[_Flight]) -> float:
        """Set the rates that the links allow. Returns the part of the core that moving at these rates takes."""
        if len(loading) == 1:
            loading[0].rate = loading[0].share = 1.0
            return loading[0].demand
        users: dict[str, int] = {}
        crowd: dict[str, int] = {}
        for flight in loading:
            stream = flight.transfer.stream
            crowd[stream] = crowd.get(stream, 0) + 1
            for link in dict.fromkeys(flight.transfer.links):
                users[link] = users.get(link, 0) + 1
        demand = 0.0
        for flight in loading:
            most = max([users[link] for link in flight.transfer.links], default=1)
            flight.rate = flight.share = 1.0 / max(most, crowd[flight.transfer.stream])
            demand += flight.rate * flight.demand
        return demand
