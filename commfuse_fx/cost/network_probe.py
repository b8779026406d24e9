"""What collectives cost the ranks of one group, measured on the running ranks.

All ranks of the group take part. How often something is measured is agreed between them, so that none is left alone
in a collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from statistics import mean, median
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist

from commfuse_fx.cost.fit import Sample
from commfuse_fx.cost.probe import synchronize
from commfuse_fx.progress import progress

SIZES = (*(1024 * 4**i for i in range(8)), 32 << 20)
"""Payloads in bytes: 1 KiB to 16 MiB in steps of four, and 32 MiB."""

SLOW = 1.0
"""Payloads do not grow to where one collective would take longer than so many seconds."""

PIPELINED_BYTES = 4 << 20

PAUSE = 0.05
"""Seconds in which a network earns back what it may carry at once."""

MESSAGES, MESSAGE_BYTES = 32, 1024
"""How many messages, and how small, show what a message costs besides its bytes."""

RUNS = (3, 30)
"""How often, at least and at most, compute beside collectives is measured: single runs differ by a third."""

ROW = 0.05
"""Seconds of collectives, about, beside which compute is measured at a time, and half of that without any."""

LEAST_IN_ROW = 6
"""Collectives of a row with much in each: so many that the latency of the first counts for little."""

UPDATED, PARTS = 6 << 20, 24
"""Elements of each tensor of the update in that compute, more than caches hold, and the parts that it comes in."""

WEIGHTS = {"all_reduce": 8.0, "all_gather": 1.0, "broadcast": 1.0}
"""What each kind counts in a fit: gradients are all_reduced."""


def shown(what: str) -> AbstractContextManager[None]:
    """A line about what is being measured, on one rank."""
    return progress(f"calibrating: {what}") if dist.get_rank() == 0 else nullcontext()


@dataclass(frozen=True)
class Contention:
    """What collectives and compute of one rank are to each other on the core that they share.

    per_byte: seconds of compute that a byte on the wire takes away; per_message: that a message does. latency: seconds
    of a message while the ranks compute; bandwidth: bytes per second of all_reduces on the wire in the meantime.
    """

    per_byte: float
    per_message: float
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class NetworkFigures:
    """What one rank found out about one level; `samples` is empty on a rank that did not take part.

    samples: single collectives. pipelined: one of many that are on their way at once. rested: single ones, each after
    a pause. contention: None where no core of the ranks moves bytes.
    """

    samples: tuple[Sample, ...] = ()
    pipelined: Sample | None = None
    rested: tuple[Sample, ...] = ()
    contention: Contention | None = None


class Group:
    """Ranks that measure together: their collectives, their clock, and the numbers they agree on."""

    def __init__(self, handle: Any, ranks: tuple[int, ...], device: torch.device) -> None:
        self.handle = handle
        self.ranks = ranks
        self.size = len(ranks)
        self.device = device

    def timed(self, call: Callable[[], Any]) -> float:
        synchronize(self.device)
        start = perf_counter()
        call()
        synchronize(self.device)
        return perf_counter() - start

    def agreed(self, seconds: float) -> float:
        """The largest of the ranks' values: what follows from it is the same on all of them."""
        value = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(value, dist.ReduceOp.MAX, self.handle)
        return float(value)

    def all_reduce(self, x: torch.Tensor) -> Any:
        return dist.all_reduce(x, group=self.handle, async_op=True)

    def collective(self, kind: str, nbytes: int) -> tuple[int, int, Callable[[], Any]]:
        """(bytes of the payload, collectives in one call, the call)."""
        count = max(nbytes // 4 // self.size, 1) * self.size
        x = torch.zeros(count, device=self.device)
        if kind == "all_reduce":
            return count * 4, 1, lambda: dist.all_reduce(x, group=self.handle)
        if kind == "all_gather":
            part = torch.zeros(count // self.size, device=self.device)
            return count * 4, 1, lambda: _all_gather(x, part, group=self.handle)

        def broadcasts() -> None:
            # Each rank is the root once: a root alone would run ahead of those that it sends to.
            for root in self.ranks:
                dist.broadcast(x, root, self.handle)

        return count * 4, self.size, broadcasts


# Its old name warns from torch 2.13 on.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def measure_group(group: Group, name: str, seconds: float) -> NetworkFigures:
    """Measure a group in about so many seconds; all its ranks must call it. name: of the level, for progress lines."""
    with shown(f"collectives of level {name}"):
        samples = _ladder(group, 0.4 * seconds)
    alone = max(s.seconds for s in samples if s.kind == "all_reduce" and s.nbytes <= PIPELINED_BYTES)
    alone = group.agreed(alone)
    nbytes = max(s.nbytes for s in samples if s.kind == "all_reduce" and s.nbytes <= PIPELINED_BYTES)
    with shown(f"several collectives of level {name} at once"):
        pipelined = _in_flight(group, nbytes, alone, 0.15 * seconds)
        rested = _after_pauses(group, nbytes, 0.1 * seconds)
    with shown(f"compute beside collectives of level {name}"):
        contention = _contention(group, nbytes, alone, 0.35 * seconds)
    return NetworkFigures(tuple(samples), pipelined, rested, contention)


def _ladder(group: Group, seconds: float) -> list[Sample]:
    """Each kind at each size, one collective at a time, until the network or the budget says stop."""
    samples: list[Sample] = []
    # Larger ones get more time: few of them fit into it.
    unit = seconds / sum(range(len(SIZES) + 1)) / len(WEIGHTS)
    start = perf_counter()
    expected = 0.0
    for number, size in enumerate(SIZES):
        worst = 0.0
        for kind, weight in WEIGHTS.items():
            nbytes, count, call = group.collective(kind, size)
            if expected < SLOW / 4:
                call()  # connections are made, and memory is touched for the first time
            first = group.agreed(group.timed(call))
            repeats = min(max(math.ceil(unit * (number + 1) / first), 3 if first < SLOW / 4 else 1), 100)
            times = [group.timed(call) / count for _ in range(repeats)]
            samples.append(Sample(kind, group.size, nbytes, median(times), weight))
            worst = max(worst, first / count)
        expected = worst * SIZES[min(number + 1, len(SIZES) - 1)] / size
        if expected > SLOW or (number >= 3 and group.agreed(perf_counter() - start) > seconds):
            break
    return samples


def _in_flight(group: Group, nbytes: int, alone: float, seconds: float) -> Sample:
    """One of many all_reduces that are handed over at once, as a training step does, once the network is busy.

    Rows follow each other without a pause: single ones find buffers empty and allowances unspent (a token bucket lets
    a burst pass at full speed). Whatever else the machine does makes rows longer, never shorter, so the faster ones
    count.
    """
    count = min(max(int(seconds / 9 / alone), 2), 8)
    blocks = [torch.zeros(nbytes // 4, device=group.device) for _ in range(2 * count)]

    def row() -> float:
        def call() -> None:
            for work in [group.all_reduce(block) for block in blocks]:
                work.wait()

        return group.agreed(group.timed(call))

    repeats = min(max(int(seconds / (2 * count * alone)), 3), 9)
    row()  # spends what the network allows at once
    return Sample("all_reduce", group.size, nbytes, _fast([row() for _ in range(repeats)]) / len(blocks))


def _fast(times: Sequence[float]) -> float:
    """The lower quartile."""
    return sorted(times)[len(times) // 4]


def _after_pauses(group: Group, most: int, seconds: float) -> tuple[Sample, ...]:
    """Single all_reduces of some sizes, on a network that has had time to rest."""
    found = []
    sizes = [most >> shift for shift in (6, 4, 2, 0)]
    repeats = min(max(int(seconds / len(sizes) / PAUSE), 1), 5)
    for nbytes in sizes:
        _, _, call = group.collective("all_reduce", nbytes)
        times = []
        for _ in range(repeats):
            sleep(PAUSE)
            group.agreed(0.0)  # start together
            times.append(group.agreed(group.timed(call)))
        found.append(Sample("all_reduce", group.size, nbytes, _fast(times)))
    return tuple(found)


def _contention(group: Group, nbytes: int, alone: float, seconds: float) -> Contention | None:
    if group.device.type != "cpu":
        return None
    small = [torch.zeros(MESSAGE_BYTES // 4) for _ in range(MESSAGES)]
    lost, elapsed = _lost(group, small, seconds / 2)
    each = lost / MESSAGES
    # Gloo works on two at a time, so each of them takes twice its share of the row.
    latency = 2 * elapsed / MESSAGES / Sample("all_reduce", group.size, MESSAGE_BYTES, alone).messages
    count = min(max(int(ROW / alone), LEAST_IN_ROW), 16)
    large = [torch.zeros(nbytes // 4) for _ in range(count)]
    wire_bytes = count * Sample("all_reduce", group.size, nbytes, alone).wire_bytes
    lost, elapsed = _lost(group, large, seconds / 2)
    return Contention(max(lost - count * each, 0.0) / wire_bytes, each, latency, wire_bytes / elapsed)


def _lost(group: Group, blocks: Sequence[torch.Tensor], seconds: float) -> tuple[float, float]:
    """Seconds of compute that these all_reduces take away while they are on their way, and how long they are.

    What the compute takes without them is measured before and after each run: a machine's speed may drift. As many
    runs as fit into so many seconds; their median counts.
    """
    compute = _Compute()
    compute.once()
    pause = min(ROW / 2, seconds / 10)
    undisturbed = [_seconds_of(group, compute, pause)]
    found: list[float] = []
    lasted: list[float] = []
    runs = RUNS[0]
    while len(found) < runs:
        group.agreed(0.0)  # start together
        start = perf_counter()
        works = [group.all_reduce(block) for block in blocks]
        done = 0
        while not all(work.is_completed() for work in works):
            compute.once()
            done += 1
        for work in works:
            work.wait()
        elapsed = perf_counter() - start
        undisturbed.append(_seconds_of(group, compute, pause))
        found.append(elapsed - done * mean(undisturbed[-2:]))
        lasted.append(elapsed)
        if len(found) == 1:
            runs = min(max(int(seconds / (group.agreed(elapsed) + pause)), RUNS[0]), RUNS[1])
    return max(median(found), 0.0), median(lasted)


class _Compute:
    """A step in small: a product that the caches hold, and a part of an update, which they do not."""

    def __init__(self) -> None:
        self._a, self._b, self._c = (torch.zeros(256, 256) for _ in range(3))
        param, mean, variance = (torch.zeros(UPDATED) for _ in range(3))
        parts = [tensor.split(UPDATED // PARTS) for tensor in (param, mean, variance)]
        self._updates = cycle(zip(*parts, strict=True))

    def once(self) -> None:
        torch.mm(self._a, self._b, out=self._c)
        param, mean, variance = next(self._updates)
        torch.addcmul(param, mean, variance, out=param)


def _seconds_of(group: Group, compute: _Compute, seconds: float) -> float:
    """One round of the compute, with no collective around, all ranks at once."""
    group.agreed(0.0)
    count, start = 0, perf_counter()
    while count < 3 or perf_counter() - start < seconds:
        compute.once()
        count += 1
    return (perf_counter() - start) / count
