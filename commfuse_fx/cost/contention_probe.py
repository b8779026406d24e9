"""What collectives and compute take from each other on the core of a rank, measured on the running ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch

from commfuse_fx.cost.fit import Sample
from commfuse_fx.cost.probe_group import Group
from commfuse_fx.runtime.socket_threads import share_a_core
from commfuse_fx.runtime.turns import give_way, turn_seconds

MESSAGES, MESSAGE_BYTES = 32, 1024
"""How many messages at a time, and how small, show what a message costs besides its bytes."""

SPARSE, SPACING = 8, 4e-3
"""So many messages, so many seconds apart, are like those of a step: what they need is no longer in the caches, nor is
what the step needs after them. In a row each costs about half as much."""

RUNS = (3, 30)
"""How often, at least and at most, compute beside collectives is measured: single runs differ by a third."""

ROW = 0.05
"""Seconds of collectives, about, beside which compute is measured at a time, and half of that without any."""

LEAST_IN_ROW = 6
"""Collectives of a row with much in each: so many that the latency of the first counts for little."""

UPDATED, PARTS = 6 << 20, 24
"""Elements of each tensor of the update in that compute, more than caches hold, and the parts that it comes in."""


@dataclass(frozen=True)
class Contention:
    """What collectives and compute of one rank are to each other on the core that they share.

    per_byte: seconds of compute that a byte on the wire takes away; per_message: that a message does, milliseconds from
    the next. latency: seconds of a message while the ranks compute; bandwidth: bytes per second of all_reduces on the
    wire in the meantime.
    """

    per_byte: float
    per_message: float
    latency: float
    bandwidth: float


def measure_contention(group: Group, nbytes: int, alone: float, seconds: float) -> Contention | None:
    """Measure in about so many seconds; all ranks of the group must call it. None where no core moves the bytes.

    nbytes: payload of a large all_reduce; alone: seconds that it takes alone.
    """
    if group.device.type != "cpu":
        return None
    wire_bytes = Sample("all_reduce", group.size, nbytes, alone).wire_bytes
    turn = turn_seconds(wire_bytes / alone)
    small = [torch.zeros(MESSAGE_BYTES // 4) for _ in range(MESSAGES)]
    lost, elapsed = _lost(group, [small], seconds / 4, turn)
    each = lost / MESSAGES
    # Gloo works on two at a time, so each of them takes twice its share of the row.
    latency = 2 * elapsed / MESSAGES / Sample("all_reduce", group.size, MESSAGE_BYTES, alone).messages
    lost, _ = _lost(group, [[block] for block in small[:SPARSE]], seconds / 4, turn, SPACING)
    sparse = max(lost / SPARSE, each)
    count = min(max(int(ROW / alone), LEAST_IN_ROW), 16)
    large = [torch.zeros(nbytes // 4) for _ in range(count)]
    lost, elapsed = _lost(group, [large], seconds / 2, turn)
    moved = count * wire_bytes
    return Contention(max(lost - count * each, 0.0) / moved, sparse, latency, moved / elapsed)


def _lost(
    group: Group, rows: Sequence[Sequence[torch.Tensor]], seconds: float, turn: float, spacing: float = 0.0
) -> tuple[float, float]:
    """Seconds of compute that all_reduces of these blocks take away, and how long the run is that they are in.

    rows: a row goes onto its way at once, the next one when it is done, `spacing` seconds later at the earliest. turn:
    seconds of compute after which that gives way. What the compute takes without them is measured before and after
    each run: a machine's speed may drift. As many runs as fit into so many seconds; their median counts.
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
        done = sum([_computed(compute, [group.all_reduce(block) for block in row], turn, spacing) for row in rows])
        elapsed = perf_counter() - start
        undisturbed.append(_seconds_of(group, compute, pause))
        found.append(elapsed - done * mean(undisturbed[-2:]))
        lasted.append(elapsed)
        if len(found) == 1:
            runs = min(max(int(seconds / (group.agreed(elapsed) + pause)), RUNS[0]), RUNS[1])
    return max(median(found), 0.0), median(lasted)


def _computed(compute: _Compute, works: Sequence[Any], turn: float, least: float) -> int:
    """Compute until these are done, and so many seconds at least, giving way to them as a step does. How often."""
    gives_way = share_a_core()
    start = gave_way = perf_counter()
    done = 0
    while perf_counter() - start < least or not all(work.is_completed() for work in works):
        compute.once()
        done += 1
        if gives_way and perf_counter() - gave_way >= turn:
            give_way()
            gave_way = perf_counter()
    for work in works:
        work.wait()
    return done


class _Compute:
    """A step in small: a product that the caches hold, and a part of an update, which they do not."""

    def __init__(self) -> None:
        self._a, self._b, self._c = (torch.zeros(256, 256) for _ in range(3))
        param, average, variance = (torch.zeros(UPDATED) for _ in range(3))
        parts = [tensor.split(UPDATED // PARTS) for tensor in (param, average, variance)]
        self._updates = cycle(zip(*parts, strict=True))

    def once(self) -> None:
        torch.mm(self._a, self._b, out=self._c)
        param, average, variance = next(self._updates)
        torch.addcmul(param, average, variance, out=param)


def _seconds_of(group: Group, compute: _Compute, seconds: float) -> float:
    """One round of the compute, with no collective around, all ranks at once."""
    group.agreed(0.0)
    count, start = 0, perf_counter()
    while count < 3 or perf_counter() - start < seconds:
        compute.once()
        count += 1
    return (perf_counter() - start) / count
