"""Which process group a step was made for, and whether that is the one that runs now.

Why: docs/decisions.md, "Ranks are taken up where they are used".
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from commfuse_fx.errors import CommFuseError, PlanMismatchError
from commfuse_fx.support.launchers import several_ranks
from commfuse_fx.support.ranks import is_distributed


def check_joined() -> None:
    """Raises CommFuseError in a process without a process group that a launcher has started as one of several."""
    said = "" if is_distributed() else several_ranks()
    if said:
        raise CommFuseError(
            f"{said}, but this process has joined no process group, and so would train alone: call cf.init() or "
            'torch.distributed.init_process_group() first, or pass parallel_mode="stand_alone" to cf.compile where '
            "each rank is to train by itself"
        )


def check_same_turn(called: Sequence[str]) -> None:
    """Raises PlanMismatchError, on all ranks, if they have not called the same step first in a world joined late.

    called: what each rank has called, by rank.
    """
    other = next((rank for rank, each in enumerate(called) if each != called[0]), None)
    if other is not None:
        raise PlanMismatchError(
            "a process group was joined after cf.compile, and ranks make the first calls in it in different orders\n"
            f"  rank 0: {called[0]}\n  rank {other}: {called[other]}\n"
            "Numbers count what was compiled and waits for the group. Compile the same in the same order on all ranks, "
            "and make first calls (evaluations, too) in the same order, or join the group before cf.compile."
        )


class JoinedWorld:
    """A joined world is the process group of all ranks that something was made for, or none.

    It does not keep the group alive. A copy, or what is unpickled in another process, does not know of any.
    """

    def __init__(self) -> None:
        self._found: Callable[[], Any] = _nothing
        self._is_alone = False
        self.follow()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unknown, ()

    def stays(self) -> bool:
        """Whether it is the group that runs now. Without one: whether this process is known to be alone."""
        world = _running()
        return self._is_alone if world is None else world is self._found()

    def follow(self) -> None:
        """From now on it is the group that runs, or none."""
        world = _running()
        self._found = _nothing if world is None else weakref.ref(world)

    def follow_alone(self) -> None:
        """As `follow`, and without a group this process is alone, as `stays` asks."""
        self.follow()
        self._is_alone = True


def _unknown() -> JoinedWorld:
    found = JoinedWorld()
    found._found = _nothing
    return found


def _nothing() -> None:
    return None


def _running() -> Any:
    return dist.group.WORLD if dist.is_available() else None
