"""What messages take of the compute beside them, by a clock of the test's own and a backend that takes what it says."""

from __future__ import annotations

import pytest
import torch

from commfuse_fx.measure import contention_probe
from commfuse_fx.measure.contention_probe import SPACING, SPARSE, Contention, measure_contention
from commfuse_fx.measure.probe_group import Group

SMALL, LARGE = 1e-3, 4e-3
"""Seconds of the core that messages take away, as soon as they are issued."""

ONCE = 1e-4
"""Seconds of one round of the compute."""

TAKES = 2.35e-3
"""Seconds from handing a message over to its end."""


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Compute:
    def __init__(self, clock: _Clock) -> None:
        self.clock = clock

    def once(self) -> None:
        self.clock.now += ONCE


class _Work:
    def __init__(self, clock: _Clock) -> None:
        self.clock = clock
        self.end = clock.now + TAKES

    def is_completed(self) -> bool:
        return self.clock.now >= self.end

    def wait(self) -> None:
        pass


class _Group(Group):
    """Two ranks whose messages take so long of the core, half of it where one follows another at once."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__(None, (0, 1), torch.device("cpu"))
        self.clock = clock
        self.issued: list[float] = []
        self.last = -1.0

    def agreed(self, seconds: float) -> float:
        return seconds

    def all_reduce(self, x: torch.Tensor) -> _Work:
        start = self.clock.now
        self.issued.append(start)
        whole = LARGE if x.numel() > 1024 else SMALL
        self.clock.now += whole / 2 if start - self.last < SPACING / 2 else whole
        self.last = self.clock.now
        return _Work(self.clock)


def measured(monkeypatch: pytest.MonkeyPatch) -> tuple[_Group, Contention]:
    clock = _Clock()
    monkeypatch.setattr(contention_probe, "perf_counter", clock)
    monkeypatch.setattr(contention_probe, "_Compute", lambda: _Compute(clock))
    group = _Group(clock)
    found = measure_contention(group, 1 << 20, alone=5e-3, seconds=1.2)
    assert found is not None
    return group, found


def test_a_message_costs_what_it_does_behind_another_and_alone_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    group, found = measured(monkeypatch)
    assert found.per_message == pytest.approx(0.75 * SMALL, rel=0.1)
    gaps = [after - before for before, after in zip(group.issued, group.issued[1:], strict=False)]
    assert sum(1 for gap in gaps if gap >= SPACING - ONCE) >= SPARSE


def test_latency_is_that_of_single_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = measured(monkeypatch)
    # Two messages follow one another in an all_reduce of two ranks. When the last one ends is seen to a round.
    assert found.latency == pytest.approx(TAKES / 2, abs=ONCE / 2)


def test_a_byte_costs_what_large_messages_in_a_row_take_more_than_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = measured(monkeypatch)
    # An all_reduce of two ranks sends as many bytes as it has.
    assert found.per_byte == pytest.approx((LARGE - SMALL) / 2 / (1 << 20), rel=0.15)
