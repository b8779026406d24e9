"""What steps take by a clock whose host is ahead of its device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from commfuse_fx.measure.clocks import HostClock
from commfuse_fx.trials import step_clock
from commfuse_fx.trials.step_clock import StepClock


class Device(HostClock):
    """A device that ends its work at `now`. Marks have no time before the host has waited for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.marks: list[list[float]] = []
        self.waits = 0

    def mark(self) -> Any:
        self.marks.append([])
        self.marks[-1].append(self.now)
        return self.marks[-1], self.waits

    def settle(self) -> None:
        self.waits += 1

    def seconds(self, begin: Any, end: Any) -> float:
        (first, _), (last, waits) = begin, end
        assert self.waits > waits, "the device has not come here yet"
        return last[0] - first[0]


def plan(training: bool = True) -> Any:
    return SimpleNamespace(compiled=SimpleNamespace(program=SimpleNamespace(training=training)))


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def clock(device: Device) -> StepClock:
    with patch.object(step_clock, "clock_of", lambda devices: device):
        return StepClock(None, torch.device("cpu"))  # nobody votes here


def run(clock: StepClock, device: Device, *steps: tuple[float, Any]) -> None:
    for seconds, ran in steps:
        clock.before_step()
        device.now += seconds
        clock.after_step(ran, None)


def test_steps_are_timed_on_the_device_which_is_waited_for_before_a_decision_only(
    clock: StepClock, device: Device
) -> None:
    one, found = plan(), []
    clock.next_at(3, lambda: found.append((clock.first, clock.times)))
    run(clock, device, (5.0, one), (2.0, one), (3.0, one))
    assert device.waits == 1 and not found
    run(clock, device, (1.0, one))
    assert found == [(5.0, [2.0, 3.0])] and device.waits == 1


def test_a_step_of_another_plan_is_not_timed(clock: StepClock, device: Device) -> None:
    one, other, found = plan(), plan(), []
    clock.next_at(5, lambda: found.append(clock.times))
    run(clock, device, (1.0, one), (2.0, one), (9.0, other), (4.0, other), (8.0, one), (0.0, one))
    assert found == [[2.0, 4.0]]
    clock.is_mixed = True
    clock.next_at(3, lambda: found.append(clock.times))
    run(clock, device, (1.0, one), (9.0, other), (8.0, one), (0.0, one))
    assert found[1] == [9.0, 8.0]


def test_evaluation_and_steps_of_a_pause_do_not_count(clock: StepClock, device: Device) -> None:
    one, found = plan(), []
    clock.next_at(2, lambda: found.append(clock.times))
    with clock.paused():
        run(clock, device, (7.0, one))
    run(clock, device, (1.0, one), (0.0, plan(training=False)), (2.0, one), (0.0, one))
    assert clock.steps == 3 and found == [[2.0]]


def test_nothing_is_kept_of_steps_that_no_decision_follows(clock: StepClock, device: Device) -> None:
    one = plan()
    clock.next_at(1, lambda: None)
    run(clock, device, (1.0, one), (1.0, one))
    marks = len(device.marks)
    run(clock, device, *[(1.0, one)] * 5)
    assert len(device.marks) == marks
