"""Who holds process groups, and lets go of them when the program ends."""

from __future__ import annotations

import atexit
import gc
import weakref
from typing import Protocol

from commfuse_fx.runtime.ranks.ballot_box import release_ballot_boxes


class Holder(Protocol):
    """A holder of process groups."""

    def release(self) -> None:
        """Let go of them."""
        ...


def release_at_exit(holder: Holder) -> None:
    """Let this one go of its process groups when the program ends, if it still lives then."""
    _holders.add(holder)


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


@atexit.register
def _release() -> None:
    """Let go of process groups while the interpreter is whole.

    Gloo's threads need the interpreter when they end. A group that lives until the interpreter is taken
    apart, in a reference cycle of a step, say, aborts the process ("terminate called without an active
    exception").
    """
    holders = list(_holders)
    for holder in holders:
        holder.release()
    release_ballot_boxes()
    if holders:
        gc.collect()
