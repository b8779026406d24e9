"""A line on stderr while the user waits; nothing when stderr is not a terminal or rich is not installed, on other ranks
than 0, and while log messages go to the same place."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Show `what` with a spinner until the block ends. The block gets a function that shows another text instead."""
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0" or os.environ.get("COMMFUSE_LOGS"):
        yield lambda text: None
        return
    try:
        from rich.console import Console
    except ImportError:
        yield lambda text: None
        return
    with Console(stderr=True).status(_line(what)) as status:
        yield lambda text: status.update(_line(text))


def _line(what: str) -> str:
    return f"commfuse: {what} ..."
