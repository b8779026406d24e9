"""Clocks that time ops: of the host, and of a GPU, whose ops go on after their calls have returned.

Why: docs/decisions.md, "A step on CUDA does not let the host wait".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

AHEAD = 200_000
"""Cycles that a GPU idles before an op that is timed: about 0.1 ms, in which the host starts the op. So its kernels
follow each other without waiting for the host."""


class HostClock:
    """A clock for ops that are over when their call returns."""

    def mark(self) -> Any:
        """A point in time, between the ops before and after it."""
        return perf_counter()

    def begin(self) -> Any:
        """A point in time just before an op that is timed alone."""
        return perf_counter()

    def settle(self) -> None:
        """Wait until all marks have been passed. `seconds` may be asked afterwards."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds between two marks."""
        return float(end - begin)


class EventClock(HostClock):
    """A clock for ops on CUDA devices: events on the current stream of each. The device that takes longest counts."""

    def __init__(self, devices: Sequence[int], event: Callable[[], Any] | None = None) -> None:
        self._devices = devices
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))

    def mark(self) -> Any:
        events = []
        for device in self._devices:
            events.append(self._event())
            events[-1].record(torch.cuda.current_stream(device))
        return events

    def begin(self) -> Any:
        for device in self._devices:
            with torch.cuda.device(device):
                torch.cuda._sleep(AHEAD)
        return self.mark()

    def settle(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)

    def seconds(self, begin: Any, end: Any) -> float:
        return max(float(first.elapsed_time(last)) for first, last in zip(begin, end, strict=True)) / 1e3


def clock_of(devices: Sequence[int]) -> HostClock:
    """The clock for ops of a program. devices: the numbers of its CUDA devices, none for a program on the CPU."""
    return EventClock(devices) if devices else HostClock()
