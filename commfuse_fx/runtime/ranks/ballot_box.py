"""The ballot box of a world carries the votes of all its compiled steps over one Gloo group.

One group needs only one set of threads. It also lets the votes meet when ranks call different steps, so every rank
notices. With one group per step, those ranks would wait for each other until the time-out.

Why: docs/decisions.md, "All compiled steps of a world vote over one group".
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

from commfuse_fx.runtime.ranks.callers import Callers
from commfuse_fx.runtime.ranks.distress import Distress
from commfuse_fx.runtime.ranks.joining.starts import name_of_start
from commfuse_fx.runtime.ranks.joining.world import world_timeout


class BallotBox:
    """A ballot box carries the votes of all steps of one world.

    group: a Gloo group of all ranks that carries votes only.
    distress: the channel on which a rank says that it left a step between its collectives.
    broken: the class name of the error that ended a step that way; "" while all ranks are in step.
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
        """Count one more compiled step; returns its number, from 1."""
        self._steps += 1
        return self._steps


_boxes: weakref.WeakKeyDictionary[Any, BallotBox] = weakref.WeakKeyDictionary()
"""The ballot box of each world, by its process group: after `destroy_process_group` a new world gets a new box."""


def ballot_box() -> BallotBox:
    """The ballot box of the running world. The first call makes it, so all ranks have to make that call."""
    world = dist.group.WORLD
    if world not in _boxes:
        _boxes[world] = BallotBox()
    return _boxes[world]


def release_ballot_boxes() -> None:
    """Drop all ballot boxes with their process groups."""
    _boxes.clear()
