"""A rank that is forked finishes its pending updates first, and its child never communicates.

The threads that communicate stay in the parent, and so do the connections. A step that was made before the fork
therefore raises ForkError in the child.

Why: docs/decisions.md, "A fork finishes what one rank can finish, and refuses the rest in the child".
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch.distributed as dist

from commfuse_fx.errors import CommFuseError, ForkError
from commfuse_fx.runtime.ranks.distress import never_destroy_groups

log = logging.getLogger("commfuse_fx.runtime")

_forks = 0  # between the process that first imported this and the present one


def process() -> int:
    """The number of forks that lead to this process: a forked child has another number than its parent."""
    return _forks


def check_process(made_in: int, what: str) -> None:
    """Raises ForkError if `made_in` is the number of another process, from which this one was forked."""
    if made_in != _forks:
        raise ForkError(f"process {os.getpid()} was forked from a rank of a training, and {what}")


class Follower(Protocol):
    """An object whose methods run when the process forks."""

    def before_fork(self) -> None:
        """Runs in the parent, before the fork."""

    def in_child(self) -> None:
        """Runs in the child, where the forking thread is the only one."""


class Followers:
    """All followers that are alive, in the order in which they were added. This list does not keep them alive."""

    def __init__(self) -> None:
        self._known: dict[int, ReferenceType[Follower]] = {}
        self._added = 0

    def add(self, follower: Follower) -> None:
        self._added = number = self._added + 1
        known = self._known

        def forget(_: ReferenceType[Follower]) -> None:
            known.pop(number, None)

        known[number] = ref(follower, forget)

    def before_fork(self) -> None:
        for follower in self._alive():
            self._call(follower.before_fork)

    def in_child(self) -> None:
        for follower in self._alive():
            self._call(follower.in_child)

    def _alive(self) -> list[Follower]:
        found = [reference() for reference in list(self._known.values())]
        return [follower for follower in found if follower is not None]

    @staticmethod
    def _call(method: Callable[[], None]) -> None:
        try:
            method()
        except CommFuseError as error:
            # Python ignores exceptions of fork handlers. The next call of the step raises this error again.
            log.error("while a process is forked: %s", error)


followers = Followers()


def check_world() -> None:
    """Raises ForkError if the running world belongs to a process from which this one was forked."""
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
    followers.in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=followers.before_fork, after_in_child=_in_child)
