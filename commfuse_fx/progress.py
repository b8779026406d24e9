"""A line on stderr while the user waits; nothing when stderr is not a terminal or rich is not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Show `what` with a spinner and the elapsed time until the block ends."""
    if not sys.stderr.isatty():
        yield
        return
    try:
        from rich.console import Console
    except ImportError:
        yield
        return
    with Console(stderr=True).status(f"commfuse: {what} ..."):
        yield
