"""What becomes of a rank that is forked.

The threads that communicate stay in the parent, and the connections belong to it. So updates that wait for other ranks
are finished before a fork, and what was made before one neither communicates nor waits in the child.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, WeakMethod

import torch.distributed as dist

from commfuse_fx.errors import CommFuseError, ForkError
from commfuse_fx.runtime.distress import never_destroy_groups

log = logging.getLogger("commfuse_fx.runtime")

_forks = 0  # between the process that first imported this and the present one


def process() -> int:
    """A number that a process and its forked children do not share."""
    return _forks


def check_process(made_in: int, what: str) -> None:
    """Raises ForkError where `made_in` is the number of a process that this one was forked from."""
    if made_in != _forks:
        raise ForkError(f"process {os.getpid()} was forked from a rank of a training, and {what}")


class ForkHooks:
    """Methods to call around a fork, in the order in which they were added; their objects are not kept alive."""

    def __init__(self) -> None:
        self._methods: dict[int, ReferenceType[Callable[[], None]]] = {}
        self._added = 0

    def add(self, method: Callable[[], None]) -> None:
        self._added = number = self._added + 1

        def forget(reference: ReferenceType[Callable[[], None]]) -> None:
            self._methods.pop(number, None)

        self._methods[number] = WeakMethod(method, forget)

    def __call__(self) -> None:
        for reference in list(self._methods.values()):
            method = reference()
            if method is not None:
                self._call(method)

    @staticmethod
    def _call(method: Callable[[], None]) -> None:
        try:
            method()
        except CommFuseError as error:
            # Python would ignore it. Whoever calls the step next hears of it again.
            log.error("while a process is forked: %s", error)


before_fork, in_child = ForkHooks(), ForkHooks()


def check_world() -> None:
    """Raises ForkError where the running world is that of a process that this one was forked from."""
    if _parents_world is not None and dist.group.WORLD is _parents_world:
        check_process(
            _forks - 1,
            "the process group that it sees is its parent's: compile steps there, or start programs of their own "
            "(torchrun)",
        )


_parents_world: Any = None


def _in_child() -> None:
    global _forks, _parents_world
    _forks += 1
    if dist.is_available() and dist.is_initialized():
        _parents_world = dist.group.WORLD
        never_destroy_groups()
    in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=before_fork, after_in_child=_in_child)
