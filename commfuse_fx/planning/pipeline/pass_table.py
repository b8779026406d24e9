"""All passes, by stage, in the order in which a compile runs them. A new pass is its file and one entry here.

Why: docs/decisions.md, "One table of passes, and a pass says itself when it runs".
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from commfuse_fx.passes.declaration import Pass
from commfuse_fx.passes.distribute.broadcast_buffers import BroadcastBuffers
from commfuse_fx.passes.distribute.cast_before_gather import CastBeforeGather
from commfuse_fx.passes.distribute.clip_gradients import ClipGradients
from commfuse_fx.passes.distribute.counter_random import CounterRandom
from commfuse_fx.passes.distribute.divide import Divide
from commfuse_fx.passes.distribute.divide_parameters import DivideParameters
from commfuse_fx.passes.distribute.gather_parameters import GatherParameters
from commfuse_fx.passes.distribute.lower_redistributions import LowerRedistributions
from commfuse_fx.passes.distribute.lower_user_collectives import LowerUserCollectives
from commfuse_fx.passes.distribute.micro_batches.add_held_gradients import AddHeldGradients
from commfuse_fx.passes.distribute.micro_batches.average_micro_batches import AverageMicroBatches
from commfuse_fx.passes.distribute.micro_batches.drop_gradients import DropGradients
from commfuse_fx.passes.distribute.micro_batches.hold_gradients import HoldGradients
from commfuse_fx.passes.distribute.micro_batches.hold_rows import HoldRows
from commfuse_fx.passes.distribute.range_lookups import RangeLookups
from commfuse_fx.passes.distribute.reduce_gradients import ReduceGradients
from commfuse_fx.passes.distribute.shard_optimizer import ShardOptimizer
from commfuse_fx.passes.distribute.share_update import ShareUpdate
from commfuse_fx.passes.distribute.slice_full_batch import SliceFullBatch
from commfuse_fx.passes.distribute.use_all_parameters import UseAllParameters
from commfuse_fx.passes.distribute.use_rows import UseRows
from commfuse_fx.passes.fuse.flatten_storage import FlattenStorage
from commfuse_fx.passes.fuse.fuse_collectives import FuseCollectives
from commfuse_fx.passes.fuse.keep_gradients import KeepGradients
from commfuse_fx.passes.fuse.reinplace import Reinplace
from commfuse_fx.passes.fuse.scatter_storage import ScatterStorage
from commfuse_fx.passes.kernels.channels_last import ChannelsLast
from commfuse_fx.passes.kernels.draw_masks import DrawMasks
from commfuse_fx.passes.kernels.inductor_regions import InductorRegions
from commfuse_fx.passes.kernels.weight_gradients import WeightGradients
from commfuse_fx.passes.rewrite.compute_once import ComputeOnce
from commfuse_fx.passes.rewrite.lower_average import LowerAverage
from commfuse_fx.passes.rewrite.merge_equal import MergeEqual
from commfuse_fx.passes.rewrite.plain_masks import PlainMasks
from commfuse_fx.passes.rewrite.recompute import Recompute
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

KERNELS = "kernels"
"""The stage of what only makes kernels of the CPU faster; what its passes make of a graph depends on the batch."""

UPDATE = "update"
"""The stage before which nothing has a price."""

TABLE: Mapping[str, tuple[type[Pass], ...]] = MappingProxyType(
    {
        "clean": (Simplify, MergeEqual, PlainMasks),
        "distribute": (AverageMicroBatches, SliceFullBatch, LowerUserCollectives, BroadcastBuffers),
        KERNELS: (ChannelsLast, WeightGradients, DrawMasks),
        "divide": (RangeLookups, CounterRandom, Divide),
        "reduce": (UseAllParameters, HoldGradients, AddHeldGradients, ReduceGradients, LowerRedistributions),
        "shard": (ShardOptimizer, DivideParameters, ShareUpdate, UseRows, CastBeforeGather, HoldRows, DropGradients),
        UPDATE: (ClipGradients, UpdateParameters, GatherParameters),
        "prepare": (ComputeOnce, Recompute, GradientsFirst, ResendRows, PostponeGradients),
        "fuse": (FuseCollectives, FlattenStorage, ScatterStorage, TileFirstGradient, SplitUpdates, LowerAverage),
        "schedule": (Overlap, StreamBuckets, IssueByNeed, AcrossSteps, Schedule, VoteFirst),
        "memory": (KeepGradients, InductorRegions, Reinplace, GiveWay),
    }
)
"""Stage -> its passes. Stages run in this order, and the passes of a stage as well."""
