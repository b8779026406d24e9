"""How a rank that leaves a step between its collectives tells the ranks that still wait for it.

A collective that one rank never joins fails on the others only after the time-out of the world: at once
only on those that hold a connection to a process that died. So the rank that leaves says so in the store
of the world, and whoever has waited for a while looks there.
"""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import Any

import torch.distributed as dist

PATIENCE = timedelta(seconds=1)
"""How long a rank waits before it looks whether another one has left; a wait that is shorter costs nothing."""


class Distress:
    """The messages of one compiled step. `name` is the same on every rank, and of this step alone."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._key = f"commfuse_fx/left/{name}"
        self._store = dist.distributed_c10d._get_default_store()

    def call(self, message: str) -> None:
        """Say that this rank has left. The first message stays: later ones only follow from it."""
        never_destroy_groups()
        try:
            if not self._store.check([self._key]):
                self._store.set(self._key, message)
        except RuntimeError:
            pass  # the store has gone with the process that held it: the connections tell

    def heed(self, work: Any) -> Heeding:
        """The work of a Gloo collective, whose wait() raises RuntimeError also when a rank has left."""
        return Heeding(self, work)

    def check(self) -> None:
        if self._store.check([self._key]):
            raise RuntimeError(f"left the step: {self._store.get(self._key).decode()}")


class Heeding:
    def __init__(self, distress: Distress, work: Any) -> None:
        self._distress = distress
        self._work = work

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
        """It may have come just after the last look; if it failed, a rank that left says why better than Gloo."""
        try:
            self._work.wait()
        except RuntimeError:
            self._distress.check()
            raise


def keep_forever(thing: Any) -> None:
    """Never free this object.

    What an unfinished collective works on is freed by a thread of Gloo, which needs the interpreter for that:
    if it comes while the interpreter ends, the process aborts ("terminate called without an active exception").
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def never_destroy_groups() -> None:
    """Destroying a Gloo group waits for its collectives, that is for ranks that may never come: exit without it."""
    for group, held in list(dist.distributed_c10d._world.pg_map.items()):
        keep_forever(group)
        keep_forever(held)  # its store: a rank may run the server of it in a thread
        for device in group._device_types:
            keep_forever(group._get_backend(device))
