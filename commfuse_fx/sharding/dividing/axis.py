"""What is given for one step of a division: a group of mesh axes, and the layouts that are fixed on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from commfuse_fx.ir.placement import Placement

PROPAGATED = "propagated"
"""`where` of a layout that no mark has asked for."""


@dataclass(frozen=True)
class Pin:
    """A layout that is given. `where`: who says so, for people."""

    placement: Placement
    where: str


@dataclass(frozen=True)
class Axis:
    """One group of mesh axes ("tp", or "dp,tp" where both are marked alike) of `ways` ranks.

    parameters, inputs: by name. activations: by the name of the mark's node. Inputs without a pin, and parameters
    pinned to R, are whole on every rank. local_inputs: the ranks are handed their parts of the inputs, not the whole.
    local_parameters: every rank keeps its part of a parameter, not the whole. is_data: the batch is divided here, and
    nothing else is but the activations that follow from it: parameters without a pin are whole.
    """

    group: str
    ways: int
    parameters: Mapping[str, Pin] = field(default_factory=dict)
    inputs: Mapping[str, Placement] = field(default_factory=dict)
    activations: Mapping[str, Pin] = field(default_factory=dict)
    local_inputs: bool = False
    local_parameters: bool = False
    is_data: bool = False
