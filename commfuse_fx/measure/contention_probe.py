"""What collectives and compute take from each other on the core of a rank, measured on the running ranks.

Why: docs/decisions.md, "Bursts and busy latencies are figures of a level".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from math import inf
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch

from commfuse_fx.cost.turns import turn_seconds
from commfuse_fx.measure.fit_alpha_beta import Sample
from commfuse_fx.measure.probe_group import Group
from commfuse_fx.runtime.execute.wire.socket_threads import give_way, share_a_core

MESSAGES, MESSAGE_BYTES = 32, 1024
"""How many messages at a time, and how small, show what a message costs besides its bytes."""

SPARSE, SPACING = 12, 2e-3
"""So many single messages, so many seconds apart: what they need is no longer in the caches, nor is what the step needs
after them. In a row each costs a little more than half as much. The messages of a step are both."""

RUNS = (3, 30)
"""How often, at least and at most, compute beside collectives is measured: single runs differ by a third."""

ROW = 0.05
"""Seconds of collectives, about, beside which compute is measured at a time, and half of that without any."""

LEAST_IN_ROW = 6
"""Collectives of a row with much in each: so many that the latency of the first counts for little."""

WIDTH = 144
"""Of the product in that compute, which takes a tenth of a millisecond: turns should be as far apart as in a step."""

UPDATED, PARTS = 6 << 20, 96
"""Elements of each tensor of the update in that compute, more than caches hold, and the parts that it comes in."""


@dataclass(frozen=True)
class Contention:
    """What collectives and compute of one rank are to each other on the core that they share.

    per_byte: seconds of compute that a byte on the wire takes away; per_message: that a message does, the mean of one
    alone and one of a row. latency: seconds of a message while the ranks compute; bandwidth: bytes per second of
    all_reduces on the wire in the meantime.
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
    each = _beside(group, [small], seconds / 4, turn).lost / MESSAGES
    apart = _beside(group, [[block] for block in small[:SPARSE]], seconds / 4, turn, SPACING)
    hops = Sample("all_reduce", group.size, MESSAGE_BYTES, alone).messages
    count = min(max(int(ROW / alone), LEAST_IN_ROW), 16)
    large = _beside(group, [[torch.zeros(nbytes // 4) for _ in range(count)]], seconds / 2, turn)
    return Contention(
        per_byte=max(large.lost - count * each, 0.0) / (count * wire_bytes),
        per_message=max((apart.lost / SPARSE + each) / 2, each),
        latency=apart.arrived / hops,
        bandwidth=count * wire_bytes / large.arrived,
    )


@dataclass(frozen=True)
class _Beside:
    """All_reduces beside compute, in seconds: what they take away of it in a run, and until when a row has arrived."""

    lost: float
    arrived: float


def _beside(
    group: Group, rows: Sequence[Sequence[torch.Tensor]], seconds: float, turn: float, spacing: float = 0.0
) -> _Beside:
    """Runs of compute beside all_reduces of these blocks.

    rows: a row goes onto its way at once, the next one when it is done, `spacing` seconds later at the earliest. turn:
    seconds of compute after which that gives way. What the compute takes without them is measured before and after
    each run: a machine's speed may drift. As many runs as fit into so many seconds; medians count.
    """
    compute = _Compute()
    compute.once()
    pause = min(ROW / 2, seconds / 10)
    undisturbed = [_seconds_of(group, compute, pause)]
    lost: list[float] = []
    arrived: list[float] = []
    runs = RUNS[0]
    while len(lost) < runs:
        group.agreed(0.0)  # start together
        pace = _Pace(turn)
        start = perf_counter()
        done = 0
        for number, row in enumerate(rows):
            # The messages of a step begin anywhere between two turns.
            least = spacing + turn * number / len(rows)
            rounds, after = _computed(compute, pace, [group.all_reduce(block) for block in row], least)
            done += rounds
            arrived.append(after)
        elapsed = perf_counter() - start
        undisturbed.append(_seconds_of(group, compute, pause))
        lost.append(elapsed - done * mean(undisturbed[-2:]))
        if len(lost) == 1:
            runs = min(max(int(seconds / (group.agreed(elapsed) + pause)), RUNS[0]), RUNS[1])
    return _Beside(max(median(lost), 0.0), median(arrived))


class _Pace:
    """Gives way as a step does, after so many seconds."""

    def __init__(self, turn: float) -> None:
        self._turn = turn if share_a_core() else inf
        self._last = perf_counter()

    def offer(self) -> None:
        if perf_counter() - self._last >= self._turn:
            give_way()
            self._last = perf_counter()


def _computed(compute: _Compute, pace: _Pace, works: Sequence[Any], least: float) -> tuple[int, float]:
    """Compute until these are done, and so many seconds at least.

    Returns how often, and after how many seconds they were done: about in the middle of what was computed last.
    """
    start = looked = perf_counter()
    rounds, arrived = 0, -1.0
    while True:
        before, looked = looked, perf_counter()
        if arrived < 0 and all(work.is_completed() for work in works):
            arrived = (before + looked) / 2 - start
        if arrived >= 0 and looked - start >= least:
            break
        compute.once()
        rounds += 1
        pace.offer()
    for work in works:
        work.wait()
    return rounds, arrived


class _Compute:
    """A step in small: a product that the caches hold, and a part of an update, which they do not."""

    def __init__(self) -> None:
        self._a, self._b, self._c = (torch.zeros(WIDTH, WIDTH) for _ in range(3))
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
