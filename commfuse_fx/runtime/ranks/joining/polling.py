"""Wait for an entry of the world's store by polling.

A wait of the store itself prints a warning when it times out, and Ctrl-C does not interrupt it.
"""

from __future__ import annotations

from datetime import timedelta
from time import monotonic, sleep
from typing import Any

PAUSE = 0.005
"""Seconds between two looks into the store: short beside a step, and long enough to keep the store idle."""


def value_of(store: Any, key: str, limit: timedelta) -> str | None:
    """The value of `key` as soon as some rank has set it; None if no rank does within `limit`."""
    until = monotonic() + limit.total_seconds()
    while not store.check([key]):
        if monotonic() > until:
            return None
        sleep(PAUSE)
    return str(store.get(key).decode())
