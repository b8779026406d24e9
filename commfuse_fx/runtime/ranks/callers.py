"""Threads of one process that call compiled steps take turns, in the same order on all ranks.

In every process, steps of one model take turns: a trace replaces the model's parameters for a while, and a run writes
them. With several ranks, all compiled steps of the world take turns, because their votes and collectives share process
groups. Every rank must then run the steps in the same order, which threads do not guarantee. So if votes show that the
ranks have begun different steps, rank 0's step goes first, and other ranks wait for their thread that calls it.

Why: docs/decisions.md, "Threads do not agree on an order, so rank 0's counts".
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from commfuse_fx.errors import CommFuseError

_locks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
_making = [threading.Lock()]  # held by the thread that makes a step of several ranks


def _in_child() -> None:
    """Replace all locks, because the threads that hold them are not in the child."""
    _locks.clear()
    _making[0] = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def lock_of(model: nn.Module) -> Any:
    """The lock that a thread holds while it traces or runs a step of this model."""
    found = _locks.get(model)
    return _locks.setdefault(model, threading.RLock()) if found is None else found


@contextmanager
def making_a_step() -> Iterator[None]:
    """Mark that this thread makes a step of several ranks. Raises CommFuseError if another thread does so now."""
    lock = _making[0]
    if not lock.acquire(blocking=False):
        raise CommFuseError(
            "two threads call cf.compile() at the same time: on several ranks steps are told apart by the order in "
            "which they are compiled, so compile one after the other in one thread, then hand each to its own"
        )
    try:
        yield
    finally:
        lock.release()


class OutOfTurn(Exception):
    """The votes show that rank 0 has begun step `first`, so this rank must run that step first."""

    def __init__(self, first: int) -> None:
        super().__init__(f"step {first} goes first")
        self.first = first


class Callers:
    """The threads that call the steps of one world; each step has a number."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: int | None = None  # the thread that runs a step
        self._depth = 0
        self._begun = 0  # turns so far
        self._first: int | None = None  # only this step may begin
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def have_others(self) -> bool:
        """Whether other threads that are still alive have called a step."""
        me = threading.current_thread()
        with self._changed:
            return any(thread is not me and thread.is_alive() for thread in self._threads)

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Wait for this thread's turn to run step `number`. One thread runs at a time, and its steps may nest."""
        me = threading.get_ident()
        with self._changed:
            self._threads.add(threading.current_thread())
            if self._running != me:
                self._wait(number)
                self._begin(me)
            self._depth += 1
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                if not self._depth:
                    self._running = None
                    self._changed.notify_all()

    def let_first(self, first: int, number: int, limit: float) -> None:
        """Within a turn of step `number`, let another thread run step `first`, and then take the turn back.

        Raises CommFuseError if no thread calls step `first` within `limit` seconds. This thread has the turn then, too.
        """
        me, depth, begun = threading.get_ident(), self._depth, self._begun
        with self._changed:
            self._running, self._depth, self._first = None, 0, first
            self._changed.notify_all()
            came = False
            try:
                came = self._changed.wait_for(lambda: self._begun > begun, limit)
            finally:
                if not came:
                    self._first = None
                self._wait(number)
                self._begin(me)
                self._depth = depth
        if not came:
            raise CommFuseError(
                f"rank 0 has called compiled step {first}, counted in the order in which steps were compiled, but no "
                f"thread of this rank has called it within {limit:.0f} s: call the same steps on all ranks"
            )

    def _wait(self, number: int) -> None:
        self._changed.wait_for(lambda: self._running is None and self._first in (None, number))

    def _begin(self, thread: int) -> None:
        self._running, self._first = thread, None
        self._begun += 1
