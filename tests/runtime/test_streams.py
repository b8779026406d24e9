"""Work on the streams of a step, from other ones. The streams are made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from commfuse_fx.runtime.execute import streams


class Stream:
    def __init__(self, name: str) -> None:
        self.name, self.device = name, "cuda:0"

    def wait_stream(self, other: Stream) -> None:
        log.append(f"{self.name} waits for {other.name}")


log: list[str] = []
now: list[Stream] = []


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    now.append(stream)
    yield
    now.pop()


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    log.clear()
    now[:] = [Stream("default")]
    made: Any = SimpleNamespace(current_stream=lambda device: now[-1], stream=on)
    monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=made))


def test_from_another_stream() -> None:
    own = streams.Streams([0])
    with on(Stream("side")):
        with own.current():
            log.append(f"work on {now[-1].name}")
        log.append(f"more on {now[-1].name}")
    assert log == ["work on default", "side waits for default", "more on side"]


def test_from_the_same_stream() -> None:
    with streams.Streams([0]).current():
        assert len(now) == 1
    assert not log


def test_without_devices() -> None:
    with on(Stream("side")), streams.Streams([]).current():
        assert now[-1].name == "side"
    assert not log
