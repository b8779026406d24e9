"""The distress channel: a rank that leaves a step between its collectives tells the ranks that wait for it.

A collective that one rank never joins fails on the other ranks after the time-out of the world. It fails at once only
on ranks that hold a connection to a process that died. So a rank that leaves a step writes a message to the store of
the world, and a rank that has waited for PATIENCE looks there.

Why: docs/decisions.md, "A rank that leaves a step says so".
Why: docs/decisions.md, "What is not guaranteed".
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

PATIENCE = timedelta(seconds=1)
"""How long a rank waits for a collective before it looks into the store. Shorter waits never touch the store."""


class Distress:
    """The distress channel of one world. `name` is the same on all ranks, and no other world in the store has it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._key = f"commfuse_fx/left/{name}"
        self._store = dist.distributed_c10d._get_default_store()
        self._has_told = False

    def tell(self, rank: int, what: str) -> None:
        """Say what this rank has waited for alone. The ranks that miss its next vote quote it."""
        with suppress(RuntimeError):
            self._store.set(f"{self._key}/alone/{rank}", what)
            self._has_told = True

    def tell_no_more(self, rank: int) -> None:
        """It is over: this rank votes."""
        if self._has_told:
            self._has_told = False
            with suppress(RuntimeError):
                self._store.delete_key(f"{self._key}/alone/{rank}")

    def told_by(self, ranks: Sequence[int]) -> list[str]:
        """What these ranks have told, of those that have."""
        keys = [f"{self._key}/alone/{rank}" for rank in ranks]
        try:
            return [self._store.get(key).decode() for key in keys if self._store.check([key])]
        except RuntimeError:  # the store is gone
            return []

    def call(self, message: str) -> None:
        """Say that this rank has left. The first message stays, because later ones only follow from it."""
        never_destroy_groups()
        with suppress(RuntimeError):  # the store's process has died, which the other ranks notice by their connections
            self._store.compare_set(self._key, "", message)

    def heed(self, work: Any) -> Heeding:
        """Wrap the work of a Gloo collective: its wait() raises RuntimeError also when a rank has left."""
        return Heeding(self, work)

    def check(self) -> None:
        """Raises RuntimeError with the message of the rank that has left, if one has."""
        if self._store.check([self._key]):
            raise RuntimeError(f"left the step: {self._store.get(self._key).decode()}")


class Heeding:
    """The work of a collective, whose wait() looks for messages of ranks that have left."""

    def __init__(self, distress: Distress, work: Any) -> None:
        self._distress = distress
        self._work = work

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        while True:
            try:
                self._work.wait(PATIENCE)
                return
            except RuntimeError:
                if self._work.is_completed():
                    self._fail_or_return()
                    return
            self._distress.check()

    def _fail_or_return(self) -> None:
        """The collective has ended. If it failed, the message of a rank that left explains it better than Gloo does."""
        try:
            self._work.wait()
        except RuntimeError:
            self._distress.check()
            raise


def keep_forever(thing: Any) -> None:
    """Never free this object.

    A thread of Gloo frees the tensors of an unfinished collective, and needs the interpreter for that. If this happens
    while the interpreter ends, the process aborts ("terminate called without an active exception").
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def never_destroy_groups() -> None:
    """Keep all process groups alive until the process ends.

    Destroying a Gloo group waits for its collectives, and so for ranks that may never join them.
    """
    for group, held in list(dist.distributed_c10d._world.pg_map.items()):
        keep_forever(group)
        keep_forever(held)  # its store: a rank may run the server of it in a thread
        for device in group._device_types:
            keep_forever(group._get_backend(device))
