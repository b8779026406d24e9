"""The types of the options of `compile`, for editors and type checkers; what a value may be is checked at run time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from torch.distributed.device_mesh import DeviceMesh

from commfuse_fx.config.fusion_config import FusionConfig
from commfuse_fx.config.options import ScheduleConfig, TrialLimits
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.machine.step_profile import StepProfile

ParallelMode = Literal[
    "stand_alone", "data_parallel", "hybrid_parallel", "semi_auto", "auto", "semi_auto_parallel", "auto_parallel"
]
SearchMode = Literal["dynamic_programming", "recursive_programming", "sharding_propagation"]
AnyPath = str | os.PathLike[str]
Cluster = ClusterSpec | StepProfile | AnyPath
"""Figures, "measured", "default", the name of a preset, or the path of a file."""


class KindOptions(TypedDict, total=False):
    """How the collectives of one kind are fused.

    config: None with "auto", MiB with "size", ascending cuts with "index", what `cluster=` takes with "optimal".
    """

    mode: Literal["auto", "size", "index", "optimal"]
    config: int | Sequence[int] | Cluster | None


class FusionOptions(TypedDict, total=False):
    """The keys of `comm_fusion`."""

    openstate: bool
    allreduce: KindOptions
    allgather: KindOptions
    reducescatter: KindOptions


class ParallelOptimizerOptions(TypedDict, total=False):
    """The keys of `parallel_optimizer_config`, as ParallelOptimizer explains them."""

    parallel_optimizer_threshold: int
    optimizer_weight_shard_size: int
    gradient_accumulation_shard: bool
    pad: bool
    mode: Literal["reduce_scatter", "broadcast"]
    level: Literal[1, 2, 3]


Fusion = FusionOptions | FusionConfig | Mapping[str, object] | None
ShardedUpdate = ParallelOptimizerOptions | Mapping[str, object] | None


class Options(TypedDict, total=False):
    """The options of `compile` that do not decide what it returns."""

    has_aux: bool
    return_loss: bool
    parallel_mode: ParallelMode
    mesh: DeviceMesh | Sequence[int] | None
    device_num: int | None
    global_rank: int | None
    gradients_mean: bool
    gradient_fp32_sync: bool
    enable_parallel_optimizer: bool
    parallel_optimizer_config: ShardedUpdate
    search_mode: SearchMode
    strategy_ckpt_load_file: AnyPath | None
    strategy_ckpt_load_strict: bool
    strategy_ckpt_save_file: AnyPath | None
    full_batch: bool
    parameter_broadcast: bool
    broadcast_buffers: bool | None
    find_unused_parameters: bool
    capture: Literal["trace", "dynamo"]
    pipeline_stages: int
    accumulate_steps: int
    clip_grad_norm: float | None
    schedule: Literal["overlap", "none", "auto"] | ScheduleConfig
    replan: bool | TrialLimits
    memory_limit: int | None
    backend: Literal["eager", "inductor"]
    inductor_regions: Literal["stretches", "layers"]
    cuda_graph: bool | Literal["auto"]
    cpu_kernels: bool
    skip_passes: Sequence[str]
    cluster: Cluster | None
    exchange_factors: Literal["never", "auto", "always"]
    gradient_compression: object


class ContextSettings(TypedDict, total=False):
    """What the process-wide context holds."""

    device_num: int | None
    global_rank: int | None
    gradients_mean: bool
    parallel_mode: ParallelMode
    all_reduce_fusion_config: Sequence[int] | None
    enable_parallel_optimizer: bool
    parallel_optimizer_config: ShardedUpdate
    parameter_broadcast: bool
    comm_fusion: Fusion
    gradient_fp32_sync: bool
    search_mode: SearchMode
    strategy_ckpt_load_file: AnyPath | None
    strategy_ckpt_load_strict: bool
    strategy_ckpt_save_file: AnyPath | None
    full_batch: bool
    pipeline_stages: int


Switch = Literal[
    "gradients_mean",
    "enable_parallel_optimizer",
    "parameter_broadcast",
    "gradient_fp32_sync",
    "strategy_ckpt_load_strict",
    "full_batch",
]
Number = Literal["device_num", "global_rank", "pipeline_stages"]
"""Settings by the type of what `get_auto_parallel_context` returns."""
