"""What is still to be done when a program ends its process groups."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def before_destroy(method: Callable[[], Any]) -> None:
    """Let `destroy_process_group()` call this method first, if its object still lives."""
    dist.distributed_c10d._world.comms.append(_Finalizer(method))


class _Finalizer:
    """An entry in torch's list of what it finalizes before it ends the process groups of the world."""

    def __init__(self, method: Callable[[], Any]) -> None:
        self._method = weakref.WeakMethod(method)

    def finalize(self) -> None:
        method = self._method()
        if method is not None:
            method()
