"""`compile`: check what the user gave, and hand it on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from commfuse_fx.capture.loss import LossFn
from commfuse_fx.config.compile_config import CompileConfig, Default
from commfuse_fx.frontends.compile_arguments import check_arguments
from commfuse_fx.frontends.step import CompiledStep
from commfuse_fx.support.tracebacks import user_frames_only


@user_frames_only
def compile(
    model: nn.Module,
    comm_fusion: Any = Default(None),
    *,
    loss_fn: LossFn | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    parallel_mode: Any = Default("data_parallel"),
    mesh: Any = Default(None),
    device_num: Any = Default(None),
    global_rank: Any = Default(None),
    gradients_mean: Any = Default(True),
    gradient_fp32_sync: Any = Default(True),
    enable_parallel_optimizer: Any = Default(False),
    parallel_optimizer_config: Any = Default(None),
    search_mode: Any = Default("dynamic_programming"),
    strategy_ckpt_load_file: Any = Default(None),
    strategy_ckpt_save_file: Any = Default(None),
    full_batch: Any = Default(False),
    parameter_broadcast: Any = Default(False),
    broadcast_buffers: Any = Default(False),
    pipeline_stages: Any = Default(1),
    schedule: Any = Default("overlap"),
    backend: Any = Default("eager"),
    cpu_kernels: Any = Default(True),
    cluster: Any = Default(None),
    exchange_factors: Any = Default("never"),
    gradient_compression: Any = Default(None),
) -> CompiledStep:
    """Compile the training step of `model`: the result is called once per step.

    The model is traced at the first call of the step, or of its `lower`. An argument that is not given is taken from
    `set_auto_parallel_context`, and otherwise from the default shown.

    model: the model to train. It stays the same object, and its parameters stay its own.
    comm_fusion: `{"openstate": bool, "allreduce" | "allgather" | "reducescatter": {"mode", "config"}}`. Modes
        are "auto" (64 MiB), "size" (MiB), "optimal" (shortest predicted step) and, for allreduce, "index"
        (ascending cuts). Kinds that are left out are "auto".
    loss_fn: the loss is `loss_fn(model(*inputs, **kwargs), target)`, and the step's last positional argument is
        the target. None: the model returns its loss, or carries it as `.loss` or `["loss"]`.
    optimizer: a torch.optim optimizer over the model's parameters; one call is then a whole step. None: a call
        adds the synchronised gradients to `param.grad`.
    parallel_mode: "data_parallel", "hybrid_parallel" (parameters with `layerwise_parallel` are not reduced),
        "semi_auto" (parameters and activations are divided as `shard` says) or "stand_alone" (no collectives).
    mesh: a DeviceMesh or a tuple of sizes. None: one axis over the world.
    device_num, global_rank: compile for this rank of a virtual world of 1 to 4096 ranks. `lower` works then,
        calls do not.
    gradients_mean: whether gradients are averaged over the ranks; False leaves the sum.
    gradient_fp32_sync: whether gradients of a lower precision are summed in float32 and cast back.
    full_batch: whether every rank is handed the global batch and takes its rows of it.
    parameter_broadcast: whether rank 0's parameters are sent to all ranks before the first step.
    broadcast_buffers: whether every training step begins with rank 0's buffers (BatchNorm statistics), sent in
        one collective of the graph per dtype. False, and None: each rank keeps its own.
    schedule: "overlap", "none", or a ScheduleConfig with a memory limit or with communication across steps.
    cpu_kernels: whether passes may rewrite the graph of a CPU step so that its kernels run faster. They lay
        convolutions out channels last, compute the gradients of their weights in ops of their own, and draw
        dropout masks from fewer random bits. Gradients then differ in their last digits.
    cluster: what plans are priced with: a ClusterSpec, a StepProfile, the name of a preset or the path of a
        file. None: plans that need prices take 10 Gbit/s between CPU ranks, and nodes of 8 H100 for a model on
        CUDA.

    Raises ConfigTypeError, ConfigKeyError or ConfigValueError (all of them CommFuseError) for bad options.
    Raises NotAvailableError for options that are planned.
    """
    given = dict(locals())
    for name in ("model", "loss_fn", "optimizer"):
        del given[name]
    check_arguments(model, comm_fusion, loss_fn, optimizer)
    config = CompileConfig.resolve(given)
    return CompiledStep(model, loss_fn, optimizer, config)
