"""What becomes of a rank that is forked.

The threads that communicate stay in the parent, and the connections belong to it. So updates that wait for other ranks
are finished before a fork, and what was made before one neither communicates nor waits in the child.
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
    """A number that a process and its forked children do not share."""
    return _forks


def check_process(made_in: int, what: str) -> None:
    """Raises ForkError where `made_in` is the number of a process that this one was forked from."""
    if made_in != _forks:
        raise ForkError(f"process {os.getpid()} was forked from a rank of a training, and {what}")


class Follower(Protocol):
    """What forks are told to."""

    def before_fork(self) -> None:
        """In the parent."""

    def in_child(self) -> None:
        """In the child, where the forking thread is the only one."""


class Followers:
    """They are not kept alive, and told in the order in which they came."""

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
            # Python would ignore it. Whoever calls the step next hears of it again.
            log.error("while a process is forked: %s", error)


followers = Followers()


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
    followers.in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=followers.before_fork, after_in_child=_in_child)
