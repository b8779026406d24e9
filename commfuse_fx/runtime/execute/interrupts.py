"""Postpone Ctrl-C while an update runs.

Why: docs/decisions.md, "All updates stand behind the last wait, unless you ask for across_steps".
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Inside the `with` block Ctrl-C waits until the end of the block, so that no update stops half-way.

    Only the main thread receives Ctrl-C; in other threads the block does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[Any] = []
    previous = signal.getsignal(signal.SIGINT)
    if previous is None or not callable(previous):
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if arrived:
            previous(*arrived[-1])
