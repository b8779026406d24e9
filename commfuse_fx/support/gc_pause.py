"""Python's garbage collection, put off while many objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Compiling and simulating make many objects and little garbage; scanning them again and again takes half of their
    time. As a decorator: for the length of a call."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
