"""What is decided of a step on one group of mesh axes before it is divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from commfuse_fx.ir.core.placement import Placement


@dataclass(frozen=True)
class State:
    """A state is the placements of an op's results and of its tensor inputs on one group of mesh axes."""

    outputs: tuple[Placement, ...]
    inputs: tuple[Placement, ...]


@dataclass(frozen=True)
class Decisions:
    """Decisions say how a step lies on one group of mesh axes.

    parameters: the placement of each parameter, by name.
    states: that of each op, by the name of its node.
    blocks: the numbers of blocks in which a dimension may be divided.
    """

    parameters: Mapping[str, Placement] = field(default_factory=dict)
    states: Mapping[str, State] = field(default_factory=dict)
    blocks: tuple[int, ...] = (1,)
