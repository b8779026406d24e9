"""A line on stderr while the user waits; nothing when stderr is not a terminal or rich is not installed, on other ranks
than 0, and while log messages go to the same place."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Show `what` with a spinner and the elapsed time until the block ends."""
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0" or os.environ.get("COMMFUSE_LOGS"):
        yield
        return
    try:
        from rich.console import Console
    except ImportError:
        yield
        return
    with Console(stderr=True).status(f"commfuse: {what} ..."):
        yield
