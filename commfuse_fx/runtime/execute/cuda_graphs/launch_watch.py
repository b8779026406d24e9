"""Look after steps that run from CUDA graphs on several ranks.

NCCL's own watchdog does not see collectives in a graph. If another rank has died, they would run for ever, and with
them whoever waits for the device. A thread looks whether each step ends in time, and whether a rank has left.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from time import monotonic

from commfuse_fx.errors import CollectiveError
from commfuse_fx.runtime.ranks.distress import PATIENCE, Distress
from commfuse_fx.support.logs import logger

log = logger("cuda_graphs")

_LONGEST_END = 10.0
"""Seconds to wait for the thread, which may be busy with ending communication."""


class LaunchWatch:
    """A launch watch ends communication that other ranks no longer take part in.

    rank: this rank. limit: how long a step may take. distress: where ranks say that they have left.
    abort: ends all communication of this rank that is under way on the device.
    lost: what went wrong; "" as long as all is well.
    """

    def __init__(
        self,
        rank: int,
        limit: timedelta,
        distress: Distress,
        abort: Callable[[], None],
        patience: timedelta = PATIENCE,
    ) -> None:
        self.lost = ""
        self._rank = rank
        self._limit = limit.total_seconds()
        self._distress = distress
        self._abort = abort
        self._patience = patience.total_seconds()
        self._launched: deque[Callable[[], bool]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def launched(self, is_done: Callable[[], bool]) -> None:
        """Look after a step that the device has been given. is_done: whether the device has finished it."""
        with self._changed:
            self._launched.append(is_done)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="commfuse launches", daemon=True)
                self._thread.start()
            elif len(self._launched) == 1:
                self._changed.notify()

    def check(self) -> None:
        """Raises CollectiveError if communication was lost."""
        if self.lost:
            raise CollectiveError(self.lost)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LONGEST_END)

    def _look(self) -> None:
        since = monotonic()  # when the oldest unfinished step may have begun
        while True:
            with self._changed:
                if not self._launched:
                    self._changed.wait_for(lambda: self._is_closed or self._launched)
                    since = monotonic()
                self._changed.wait(self._patience)
                if self._is_closed:
                    return
            while self._launched and self._launched[0]():
                self._launched.popleft()
                since = monotonic()
            seconds = monotonic() - since
            if self._launched and seconds > self._patience and (why := self._why_lost(seconds)):
                self._give_up(why)
                return

    def _why_lost(self, seconds: float) -> str:
        try:
            self._distress.check()
        except RuntimeError as error:  # of the rank that has left, or of the store, whose process has died
            return str(error)
        if seconds > self._limit:
            return f"the device has not finished it within the time-out of {self._limit:.0f} s"
        return ""

    def _give_up(self, why: str) -> None:
        self.lost = (
            f"rank {self._rank}: a step in a CUDA graph failed: {why}. Another rank has died, is stuck or left the "
            "step; its own output says why. Parameters and optimizer state on this rank may be half updated: start all "
            "ranks again from a checkpoint."
        )
        log.error("%s", self.lost)
        try:
            self._abort()
        except RuntimeError as error:
            log.error("rank %d: could not end its communication: %s", self._rank, error)
