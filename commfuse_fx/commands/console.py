"""What commands print, and where: results on stdout, messages on stderr, under torchrun from rank 0."""

from __future__ import annotations

import os
import sys


def rank() -> int:
    """This process's rank as torchrun says it, before any process group is there; 0 without torchrun."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def text_of(error: BaseException) -> str:
    """`str(error)`; "" where the class of the error, a user's, fails in that."""
    try:
        return str(error)
    except Exception:
        return ""


def say(message: str) -> None:
    """Print a message on rank 0's stderr."""
    if rank() == 0:
        print(f"commfuse: {message}", file=sys.stderr)
