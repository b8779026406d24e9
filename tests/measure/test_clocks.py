"""Times of ops on a GPU, with events that a test makes pass."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_fx.measure import clocks
from commfuse_fx.measure.cuda_timeline import CudaTimeline


class Event:
    """Events pass at 0, 1, 2, ... seconds, in the order in which they are recorded."""

    def __init__(self, ticks: count[int]) -> None:
        self.ticks = ticks
        self.at: int | None = None

    def record(self, stream: Any = None) -> None:
        self.at = next(self.ticks)

    def elapsed_time(self, other: Event) -> float:
        assert self.at is not None and other.at is not None
        return (other.at - self.at) * 1e3


class Work:
    """A collective that is over at once, or whose end nobody hears of."""

    def __init__(self, tells: bool) -> None:
        self.tells, self.waits = tells, 0

    def get_future(self) -> Any:
        def add_done_callback(call: Callable[[Any], None]) -> None:
            if self.tells:
                call(None)

        return SimpleNamespace(add_done_callback=add_done_callback)

    def wait(self) -> None:
        self.waits += 1


def test_events_on_the_streams_of_a_model_on_cuda() -> None:
    ticks = count()
    timeline = CudaTimeline(torch.device("cpu"), lambda: Event(ticks))  # the origin is at 0
    began = timeline._began
    timeline.begin_step()
    first, second, vote = Work(True), Work(False), Work(True)
    timeline.issued("a", "a", "all_reduce", 0.0, first, True)  # 1, done at 2
    timeline.issued("b", "b", "all_reduce", 0.0, second, True)  # 3
    timeline.issued("vote", "vote", "vote", began, vote)
    for key, work in (("vote", vote), ("a", first), ("b", second)):
        timeline.wait(key, work)  # a: 4 to 5, b: 6 to 7
    timeline.finish()
    agreed, a, b = timeline.steps[0]
    assert agreed.name == "vote" and agreed.wait_left < began + 1
    assert [each - began for each in (a.issued, a.done or 0, a.wait_entered, a.wait_left)] == pytest.approx(
        [1, 2, 4, 5]
    )
    assert [each - began for each in (b.issued, b.wait_entered, b.wait_left)] == pytest.approx([3, 6, 7])
    assert b.done is None and b.exposed == pytest.approx(1) and [first.waits, second.waits, vote.waits] == [1, 1, 1]


def test_events_of_a_timeline_are_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may be the current device, and PyTorch makes other streams of it the current ones."""
    streams: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    device = torch.device("cuda", 1)
    timeline = CudaTimeline(device, lambda: SimpleNamespace(record=lambda stream=None: streams.append(stream)))
    work = Work(True)
    timeline.begin_step()
    timeline.issued("a", "a", "all_reduce", 0.0, work, True)
    timeline.wait("a", work)
    assert streams == [device] * 5


def test_marks_on_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, did = count(), []
    cuda = SimpleNamespace(
        current_stream=lambda device: f"stream of {device}",
        synchronize=lambda device: did.append(f"synchronize {device}"),
        device=lambda device: pytest.MonkeyPatch.context(),
        _sleep=lambda cycles: did.append("idle"),
    )
    monkeypatch.setattr(clocks, "torch", SimpleNamespace(cuda=cuda))
    clock = clocks.EventClock([0, 1], lambda: Event(ticks))
    begin, end = clock.begin(), clock.mark()
    clock.settle()
    assert clock.seconds(begin, end) == 2 and did == ["idle", "idle", "synchronize 0", "synchronize 1"]


def test_a_program_on_the_cpu_has_the_clock_of_the_host() -> None:
    clock = clocks.clock_of([])
    begin, end = clock.begin(), clock.mark()
    clock.settle()
    assert type(clock) is clocks.HostClock and 0 <= clock.seconds(begin, end) < 60
    assert type(clocks.clock_of([0])) is clocks.EventClock
