"""What collectives cost the ranks of one group, measured on the running ranks.

All ranks of the group take part. How often something is measured is agreed between them, so that none is left alone
in a collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist

from commfuse_fx.measure.contention_probe import Contention, measure_contention
from commfuse_fx.measure.fit_alpha_beta import Sample, fit
from commfuse_fx.measure.probe_group import Group
from commfuse_fx.support.progress import progress

SIZES = (*(1024 * 4**i for i in range(8)), 32 << 20)
"""Payloads in bytes: 1 KiB to 16 MiB in steps of four, and 32 MiB."""

SLOW = 1.0
"""Payloads do not grow to where one collective would take longer than so many seconds."""

PIPELINED_BYTES = 4 << 20
"""Payload of the collectives that are sent in rows: bytes, not latency, should be what takes time there."""

PAUSE = 0.05
"""Seconds in which a network earns back what it may carry at once."""

WEIGHTS = {"all_reduce": 8.0, "all_gather": 1.0, "broadcast": 1.0}
"""What each kind counts in a fit: gradients are all_reduced."""


def shown(what: str) -> AbstractContextManager[Any]:
    """A line about what is being measured, on one rank."""
    return progress(f"calibrating: {what}") if dist.get_rank() == 0 else nullcontext()


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


def measure_group(group: Group, name: str, seconds: float) -> NetworkFigures:
    """Measure a group in about so many seconds; all its ranks must call it. name: of the level, for progress lines."""
    with shown(f"collectives of level {name}"):
        samples = _ladder(group, 0.4 * seconds)
        samples += _for_rows(group, samples)
    rows = [s for s in samples if s.kind == "all_reduce" and s.nbytes <= PIPELINED_BYTES]
    largest = max(rows, key=lambda sample: sample.nbytes)
    nbytes, alone = largest.nbytes, group.agreed(largest.seconds)
    with shown(f"several collectives of level {name} at once"):
        pipelined = _in_flight(group, nbytes, alone, 0.15 * seconds)
        rested = _after_pauses(group, nbytes, 0.1 * seconds)
    with shown(f"compute beside collectives of level {name}"):
        contention = measure_contention(group, nbytes, alone, 0.35 * seconds)
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
        for kind in WEIGHTS:
            sample, first = _measured(group, kind, size, unit * (number + 1), expected)
            samples.append(sample)
            worst = max(worst, first)
        expected = worst * SIZES[min(number + 1, len(SIZES) - 1)] / size
        if expected > SLOW or (number >= 3 and group.agreed(perf_counter() - start) > seconds):
            break
    return samples


def _measured(group: Group, kind: str, size: int, seconds: float, expected: float) -> tuple[Sample, float]:
    """One collective, measured for so many seconds, and what it took first. expected: what it will take, about."""
    nbytes, count, call = group.collective(kind, size)
    if expected < SLOW / 4:
        call()  # connections are made, and memory is touched for the first time
    first = group.agreed(group.timed(call))
    repeats = min(max(math.ceil(seconds / first), 3 if first < SLOW / 4 else 1), 100)
    times = [group.timed(call) / count for _ in range(repeats)]
    return Sample(kind, group.size, nbytes, median(times), WEIGHTS[kind]), first / count


def _for_rows(group: Group, reached: Sequence[Sample]) -> list[Sample]:
    """The all_reduce that rows are made of, where the ladder ended before it and the network is not too slow for it."""
    row = Sample("all_reduce", group.size, PIPELINED_BYTES, SLOW)
    expected = group.agreed(fit(reached).seconds_of(row))
    if reached[-1].nbytes > row.nbytes // 2 or expected > SLOW:
        return []
    return [_measured(group, row.kind, row.nbytes, 0.0, expected)[0]]


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
    """Single all_reduces of some sizes, on a network that has had time to rest.

    The shortest of each size counts: a burst is the difference of two times, and what else the machine does makes them
    longer, never shorter.
    """
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
        found.append(Sample("all_reduce", group.size, nbytes, min(times)))
    return tuple(found)
