"""Cuts of some collectives into buckets, played on the engine with the step's compute up to its updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from commfuse_fx.cost.numbers import EQUAL
from commfuse_fx.cost.transfer import Transfer
from commfuse_fx.machine.cluster_parts import Device
from commfuse_fx.simulate.engine import Engine
from commfuse_fx.solvers.buckets.cut_moves import Ranges, moved_cuts
from commfuse_fx.solvers.effort import EFFORT


class Message(NamedTuple):
    """A message is what others send in the same step. ready: seconds of compute before it."""

    ready: float
    transfer: Transfer


class Play(NamedTuple):
    """A play is how one way to cut goes, in seconds from the begin of the step.

    seconds: until every result can be used.
    arrival: until the last bucket is there.
    """

    seconds: float
    arrival: float


class PlayedCuts:
    """Plays cuts, each once.

    ready: seconds of compute before each member can be sent. rest: seconds of compute behind the last one. allocation:
    seconds that each bucket takes to allocate. passes: how often each result is read and written before it is used.
    each: seconds of compute that every bucket but the first adds. traffic: what others send, in order of readiness.
    """

    def __init__(
        self,
        ready: Sequence[float],
        sizes: Sequence[int],
        rest: float,
        price: Callable[[int], Transfer],
        device: Device,
        *,
        allocation: float = 0.0,
        passes: int = 0,
        each: float = 0.0,
        traffic: Sequence[Message] = (),
    ) -> None:
        self.gaps = [after - before for before, after in zip([0.0, *ready], ready, strict=False)]
        self.sizes = sizes
        self.rest = rest
        self.price = price
        self.device = device
        self.allocation = allocation
        self.passes = passes
        self.each = each
        self.ready = ready
        self.traffic = traffic
        self.known: dict[Ranges, Play] = {}

    def best(self, candidates: Iterable[Ranges]) -> Ranges:
        """The cuts that end first, the first of those with the fewest buckets among equals; then boundaries are moved
        as long as that helps and the effort lasts."""
        found = tuple(dict.fromkeys(candidates))
        limit = min(map(self.seconds, found)) * (1 + EQUAL)
        cuts = min((each for each in found if self.seconds(each) <= limit), key=len)
        most = EFFORT.plans(len(self.sizes) + len(self.traffic))
        tried = 0
        while True:
            for moved in moved_cuts(cuts):
                if tried == most:
                    return cuts
                tried += 1
                if self.seconds(moved) < self.seconds(cuts) * (1 - EQUAL):
                    cuts = moved
                    break
            else:
                return cuts

    def seconds(self, cuts: Ranges) -> float:
        return self.play(cuts).seconds

    def play(self, cuts: Ranges) -> Play:
        if cuts not in self.known:
            self.known[cuts] = self._play(cuts)
        return self.known[cuts]

    def _play(self, cuts: Ranges) -> Play:
        engine = Engine()
        overhead = self.device.collective_overhead
        sent: list[tuple[int, int]] = []
        others: list[int] = []
        coming = iter(self.traffic)
        after = next(coming, None)
        clock = 0.0

        def send_until(ready: float) -> None:
            """Compute up to here, and send what others have ready before."""
            nonlocal after, clock
            while after is not None and after.ready <= ready:
                engine.run_each((after.ready - clock, overhead))
                others.append(engine.issue(after.transfer))
                clock, after = after.ready, next(coming, None)
            engine.run(ready - clock)
            clock = ready

        for begin, end in cuts:
            if self.traffic:
                engine.run(self.allocation)
                send_until(self.ready[end - 1])
                engine.run(overhead)
            else:
                engine.run_each((self.allocation, *self.gaps[begin:end], overhead))
            nbytes = sum(self.sizes[begin:end])
            sent.append((engine.issue(self.price(nbytes)), nbytes))
        if self.traffic:
            last = self.ready[-1]
            send_until(max(last + self.rest, self.traffic[-1].ready))
        else:
            engine.run(self.rest)
        for handle, nbytes in sent:
            engine.wait(handle)
            engine.run(self._after(nbytes))
        for handle in others:
            engine.wait(handle)
        arrival = max(engine.times(handle)[2] for handle, _ in sent)
        return Play(engine.now + (len(cuts) - 1) * self.each, arrival)

    def _after(self, nbytes: int) -> float:
        """Seconds to make an average of a sum, in place, and to cast it."""
        return self.passes * max(self.device.op_overhead, 2 * nbytes / self.device.memory_bandwidth)
