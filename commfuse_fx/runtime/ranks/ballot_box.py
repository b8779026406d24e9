"""What the votes of all compiled steps of a world have in common.

One group for all of them: its threads cost once, and where the ranks call different steps their votes meet, so that
all of them learn it. Over a group for each step they would wait for each other until the time-out.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

from commfuse_fx.runtime.ranks.callers import Callers
from commfuse_fx.runtime.ranks.distress import Distress
from commfuse_fx.runtime.ranks.starts import name_of_start
from commfuse_fx.runtime.ranks.world import world_timeout


class BallotBox:
    """A ballot box carries the votes of all steps of one world.

    group: a Gloo group of all ranks that carries votes only.
    distress: where a rank says that it has left a step between its collectives.
    broken: what this rank knows of such an end; "" while all are at the same place.
    callers: the threads of this rank that call steps.
    """

    def __init__(self) -> None:
        start = name_of_start(world_timeout())
        self.group: Any = dist.new_group(backend="gloo", timeout=world_timeout())
        self.distress = Distress(f"{start}/{self.group.group_name}")
        self.broken = ""
        self.callers = Callers()
        self._steps = 0

    def next_step(self) -> int:
        """The number of one more compiled step, from 1."""
        self._steps += 1
        return self._steps


_boxes: weakref.WeakKeyDictionary[Any, BallotBox] = weakref.WeakKeyDictionary()
"""By the group of the world: after `destroy_process_group` a new world has a new one."""


def ballot_box() -> BallotBox:
    """That of the running world. The first call makes it: every rank must get there."""
    world = dist.group.WORLD
    if world not in _boxes:
        _boxes[world] = BallotBox()
    return _boxes[world]


def release_ballot_boxes() -> None:
    """Let go of their groups."""
    _boxes.clear()
