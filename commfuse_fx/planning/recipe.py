"""The order of the passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.cost.model import CostModel, cost_model
from commfuse_fx.ir.mesh import Mesh
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
from commfuse_fx.passes.schedule.give_way import GiveWay
from commfuse_fx.passes.schedule.gradients_first import GradientsFirst
from commfuse_fx.passes.schedule.overlap import Overlap
from commfuse_fx.passes.schedule.postpone_gradients import PostponeGradients
from commfuse_fx.passes.schedule.schedule import Schedule
from commfuse_fx.passes.schedule.stream_buckets import StreamBuckets
from commfuse_fx.passes.schedule.tile_first_gradient import TileFirstGradient
from commfuse_fx.passes.schedule.vote_first import VoteFirst
from commfuse_fx.planning.pipeline import Pass, PassPipeline
from commfuse_fx.planning.request import Sharding
from commfuse_fx.planning.variants import Variant


def build_pipeline(
    config: CompileConfig,
    mesh: Mesh,
    sliced_inputs: Sequence[str] = (),
    flat_updates: bool = True,
    variant: Variant | None = None,
    sharding: Sharding | None = None,
    costs: CostModel | None = None,
    same_batches: bool = True,
) -> PassPipeline:
    """The passes of one compile, in order. `sliced_inputs`: tensors that full_batch cuts, or those that have the batch
    as their first dimension where `sharding` says how the step is divided. `variant` and `costs`: by default as the
    configuration says. same_batches: False where ranks' batches differ in size: what makes both gradients of a layer is
    then one op on some ranks and two on others, and the order of two must not matter."""
    variant = Variant(config.across_steps) if variant is None else variant
    if costs is None and config.plans_by_cost:
        costs = cost_model(config.cluster)
    passes: list[Pass] = [Simplify()]
    passes += _divided(config, sliced_inputs, sharding) if sharding else _data_parallel(config, mesh, sliced_inputs)
    passes.append(UpdateParameters())
    if config.schedule != "none" and same_batches:
        passes.append(GradientsFirst())
    if variant.resent:
        passes.append(ResendRows())
    if costs is not None and variant.postponed:
        passes.append(PostponeGradients(costs, last_layers=variant.across_steps, part=variant.postponed))
    passes += [
        FuseCollectives(variant.fusion or config.comm_fusion, costs, variant.across_steps and not variant.cut_within),
        FlattenStorage(flat_updates, costs is not None and variant.stored, variant.least_stored(config)),
        *([TileFirstGradient(costs)] if costs is not None and config.schedule != "none" else []),
        SplitUpdates(variant.across_steps),
        LowerAverage(),
    ]
    if costs is not None and config.schedule != "none":
        passes.append(Schedule(costs, config.memory_limit, variant.across_steps))
        if variant.resent:
            passes.append(VoteFirst(costs))
    elif config.schedule != "none":
        passes.extend((Overlap(), StreamBuckets()))
    passes.append(KeepGradients())
    passes.append(Reinplace())
    passes.append(GiveWay())
    return PassPipeline(tuple(passes))


def _data_parallel(config: CompileConfig, mesh: Mesh, sliced_inputs: Sequence[str]) -> list[Pass]:
    group = None if config.parallel_mode == "stand_alone" else mesh.all_axes
    convolutions: list[Pass] = [ChannelsLast(), WeightGradients()] if torch.backends.mkldnn.is_available() else []
    return [
        SliceFullBatch(tuple(sliced_inputs), mesh.all_axes),
        LowerUserCollectives(),
        BroadcastBuffers(group if config.broadcast_buffers else None),
        *convolutions,
        # A rank that is alone draws what eager execution draws.
        *([DrawMasks()] if group is not None and mesh.world > 1 else []),
        ReduceGradients(
            group,
            mean=config.gradients_mean,
            fp32=config.gradient_fp32_sync,
            honour_layerwise=config.parallel_mode == "hybrid_parallel",
        ),
    ]


def _divided(config: CompileConfig, batch: Sequence[str], sharding: Sharding) -> list[Pass]:
    divide = Divide(
        sharding.marks,
        tuple(batch),
        local_inputs=not config.full_batch,
        local_parameters=sharding.local_parameters,
        fixed=sharding.fixed,
    )
    return [RangeLookups(), CounterRandom(), divide, LowerRedistributions()]
