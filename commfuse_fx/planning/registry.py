"""The passes by name, and what is known of their options."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import Any

from commfuse_fx.errors import ConfigKeyError
from commfuse_fx.passes.distribute.broadcast_buffers import BroadcastBuffers
from commfuse_fx.passes.distribute.counter_random import CounterRandom
from commfuse_fx.passes.distribute.divide import Divide
from commfuse_fx.passes.distribute.lower_redistributions import LowerRedistributions
from commfuse_fx.passes.distribute.lower_user_collectives import LowerUserCollectives
from commfuse_fx.passes.distribute.range_lookups import RangeLookups
from commfuse_fx.passes.distribute.reduce_gradients import ReduceGradients
from commfuse_fx.passes.distribute.slice_full_batch import SliceFullBatch
from commfuse_fx.passes.fuse.flatten_storage import FlattenStorage
from commfuse_fx.passes.fuse.fuse_collectives import FuseCollectives
from commfuse_fx.passes.fuse.keep_gradients import KeepGradients
from commfuse_fx.passes.fuse.reinplace import Reinplace
from commfuse_fx.passes.kernels.channels_last import ChannelsLast
from commfuse_fx.passes.kernels.draw_masks import DrawMasks
from commfuse_fx.passes.kernels.weight_gradients import WeightGradients
from commfuse_fx.passes.rewrite.lower_average import LowerAverage
from commfuse_fx.passes.rewrite.resend_rows import ResendRows
from commfuse_fx.passes.rewrite.simplify import Simplify
from commfuse_fx.passes.rewrite.split_updates import SplitUpdates
from commfuse_fx.passes.rewrite.update_parameters import UpdateParameters
from commfuse_fx.passes.schedule.across_steps import AcrossSteps
from commfuse_fx.passes.schedule.give_way import GiveWay
from commfuse_fx.passes.schedule.gradients_first import GradientsFirst
from commfuse_fx.passes.schedule.issue_by_need import IssueByNeed
from commfuse_fx.passes.schedule.overlap import Overlap
from commfuse_fx.passes.schedule.postpone_gradients import PostponeGradients
from commfuse_fx.passes.schedule.schedule import Schedule
from commfuse_fx.passes.schedule.stream_buckets import StreamBuckets
from commfuse_fx.passes.schedule.tile_first_gradient import TileFirstGradient
from commfuse_fx.passes.schedule.vote_first import VoteFirst
from commfuse_fx.support.checks import show

# In the order in which a compile runs them.
_CLASSES: tuple[type[Any], ...] = (
    Simplify,
    SliceFullBatch,
    LowerUserCollectives,
    BroadcastBuffers,
    ChannelsLast,
    WeightGradients,
    DrawMasks,
    ReduceGradients,
    RangeLookups,
    CounterRandom,
    Divide,
    LowerRedistributions,
    UpdateParameters,
    GradientsFirst,
    ResendRows,
    PostponeGradients,
    FuseCollectives,
    FlattenStorage,
    TileFirstGradient,
    SplitUpdates,
    LowerAverage,
    Overlap,
    StreamBuckets,
    IssueByNeed,
    AcrossSteps,
    Schedule,
    VoteFirst,
    KeepGradients,
    Reinplace,
    GiveWay,
)

_OF_EVERY_PASS = ("name", "requires", "ensures")


@dataclass(frozen=True)
class PassOption:
    """One option of a pass. type: as the class writes it, such as "int | None"."""

    name: str
    type: str
    required: bool
    default: Any


@dataclass(frozen=True)
class PassEntry:
    """One pass. requires, ensures: facts, as in `Pass`; purpose: what its file says first."""

    name: str
    make: type[Any]
    options: tuple[PassOption, ...]
    requires: tuple[str, ...]
    ensures: tuple[str, ...]
    purpose: str

    def option(self, name: str) -> PassOption:
        """Raises ConfigKeyError for an option that the pass does not have."""
        found = next((option for option in self.options if option.name == name), None)
        if found is None:
            known = ", ".join(option.name for option in self.options) or "no options"
            raise ConfigKeyError(f"pass {self.name} has no option {show(name)}; it has {known}")
        return found


def _entry(made: type[Any]) -> PassEntry:
    given = {field.name: field for field in fields(made)}
    options = tuple(
        PassOption(field.name, str(field.type), field.default is MISSING, field.default)
        for field in given.values()
        if field.name not in _OF_EVERY_PASS
    )
    own: dict[str, Any] = {key: given[key].default for key in _OF_EVERY_PASS}
    purpose = " ".join((sys.modules[made.__module__].__doc__ or "").split("\n\n")[0].split())
    return PassEntry(own["name"], made, options, own["requires"], own["ensures"], purpose)


PASSES: Mapping[str, PassEntry] = MappingProxyType({entry.name: entry for entry in map(_entry, _CLASSES)})
"""Name -> pass, in the order in which a compile runs them."""


def find_pass(name: str) -> PassEntry:
    """Raises ConfigKeyError for an unknown name."""
    if name not in PASSES:
        raise ConfigKeyError(f"there is no pass {show(name)}; use one of {', '.join(PASSES)}")
    return PASSES[name]
