"""A rank notices that a step in a CUDA graph does not end, and gives up its communication once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

import commfuse_fx as cf
from commfuse_fx.runtime.execute.cuda_graphs.launch_watch import LaunchWatch

SOON, LATE = timedelta(milliseconds=5), timedelta(hours=1)


class Channel:
    """The distress channel of a world in which rank 1 may leave."""

    def __init__(self) -> None:
        self.message = ""
        self.looks = 0

    def check(self) -> None:
        self.looks += 1
        if self.message:
            raise RuntimeError(f"left the step: {self.message}")


class Watched:
    def __init__(self, limit: timedelta = LATE) -> None:
        self.channel: Any = Channel()
        self.aborted = threading.Event()
        self.aborts = 0
        self.watch = LaunchWatch(0, limit, self.channel, self.abort, patience=SOON)

    def abort(self) -> None:
        self.aborts += 1
        self.aborted.set()


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.watch.close()


def test_a_message_of_another_rank_ends_communication(watched: Watched) -> None:
    watched.watch.launched(lambda: False)
    watched.watch.check()
    watched.channel.message = "rank 1: ValueError: no batch"
    assert watched.aborted.wait(20)
    with pytest.raises(cf.CollectiveError, match=r"rank 0: a step in a CUDA graph failed: left the step: rank 1: Val"):
        watched.watch.check()
    watched.watch.launched(lambda: False)
    assert watched.aborts == 1


def test_the_time_out_ends_communication() -> None:
    watched = Watched(limit=timedelta(milliseconds=20))
    watched.watch.launched(lambda: False)
    assert watched.aborted.wait(20)
    assert "the device has not finished it within the time-out of 0 s" in watched.watch.lost
    watched.watch.close()


def test_steps_that_end_are_forgotten(watched: Watched) -> None:
    ends = [threading.Event() for _ in range(3)]
    for end in ends:
        watched.watch.launched(end.is_set)
    for end in ends:
        end.set()
    looked = threading.Event()
    watched.watch.launched(lambda: bool(looked.set()))  # the thread comes to it when those before have ended
    assert looked.wait(20)
    assert not watched.watch.lost


def test_an_abort_that_fails_is_logged(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()

    def fail() -> None:
        done.set()
        raise RuntimeError("no such communicator")

    watched.watch._abort = fail
    watched.channel.message = "rank 1: killed"
    watched.watch.launched(lambda: False)
    assert done.wait(20)
    watched.watch.close()
    assert "could not end its communication: no such communicator" in caplog.text


def test_closing_ends_the_thread(watched: Watched) -> None:
    watched.watch.launched(lambda: False)
    watched.watch.close()
    assert watched.watch._thread is not None and not watched.watch._thread.is_alive()
    assert not watched.watch.lost
