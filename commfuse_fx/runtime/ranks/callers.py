"""Threads that call compiled steps of one process: who may run, and in which order.

Steps of one model take turns in every process: a trace gives the model other parameters for a while, and a run writes
them. On several ranks all compiled steps of the world take turns, as their votes and collectives share process groups.
There the order has to be the same on all ranks. Threads do not give one: so where the votes show that ranks have begun
different steps, that of rank 0 goes first, and the others wait for the thread that calls it.
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
    """Threads that hold locks are not there."""
    _locks.clear()
    _making[0] = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def lock_of(model: nn.Module) -> Any:
    """What a thread holds while it traces or runs a step of this model."""
    found = _locks.get(model)
    return _locks.setdefault(model, threading.RLock()) if found is None else found


@contextmanager
def making_a_step() -> Iterator[None]:
    """Raises CommFuseError where another thread is making a step of several ranks."""
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
    """Rank 0 has begun another step, number `first`, which a thread of this rank calls as well."""

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
        """Whether threads other than this one have called a step, and live."""
        me = threading.current_thread()
        with self._changed:
            return any(thread is not me and thread.is_alive() for thread in self._threads)

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """One thread at a time; steps may call each other."""
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
        """Inside of a turn of step `number`: give it to a thread that calls step `first`, and take it again after that.

        Raises CommFuseError where none comes within `limit` seconds; the turn is this thread's all the same.
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
                f"rank 0 has called compiled step {first}, counted in the order in which they were compiled, and no "
                f"thread of this rank has within {limit:.0f} s: call the same steps on all ranks"
            )

    def _wait(self, number: int) -> None:
        self._changed.wait_for(lambda: self._running is None and self._first in (None, number))

    def _begin(self, thread: int) -> None:
        self._running, self._first = thread, None
        self._begun += 1
