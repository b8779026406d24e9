"""Errors about what a checkpoint holds: its checksums are right, and it is not what a save writes all the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from commfuse_fx.errors import CheckpointError, CommFuseError
from commfuse_fx.support.checks import show


@contextmanager
def damage_told(what: str) -> Iterator[None]:
    """Errors of Python and torch inside of the block come from what was read, and become CheckpointErrors.

    what: it is that was read.
    """
    try:
        yield
    except (CommFuseError, OSError):
        raise
    except Exception as error:  # whatever content of another kind leads to
        raise CheckpointError(
            f"{what} is not what a save writes: take another checkpoint. [{type(error).__name__}: {show(str(error))}]"
        ) from error
