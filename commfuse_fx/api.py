"""`compile`: check what the user gave, and hand it on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from commfuse_fx.capture.loss import LossFn
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.config.option_types import AnyPath, Cluster, Fusion, Options, ParallelMode, SearchMode, ShardedUpdate
from commfuse_fx.config.options import ScheduleConfig, TrialLimits, not_given
from commfuse_fx.config.without_effect import settled, warn_of_options
from commfuse_fx.frontends.arguments_of_ddp import refuse_unknown
from commfuse_fx.frontends.compile_arguments import (
    check_arguments,
    check_cuda_graph,
    check_form_of_module,
    check_form_of_step,
    chosen_form,
)
from commfuse_fx.frontends.dynamo_module import DynamoModule
from commfuse_fx.frontends.module import CompiledModule
from commfuse_fx.frontends.step import CompiledStep
from commfuse_fx.planning.pipeline.recipe import check_skipped
from commfuse_fx.support.tracebacks import user_frames_only


@overload
def compile(
    model: nn.Module,
    comm_fusion: Fusion = ...,
    *,
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer | None = ...,
    form: Literal["step"] | None = ...,
    **options: Unpack[Options],
) -> CompiledStep: ...


@overload
def compile(
    model: nn.Module,
    comm_fusion: Fusion = ...,
    *,
    loss_fn: LossFn | None = ...,
    optimizer: torch.optim.Optimizer,
    form: Literal["step"] | None = ...,
    **options: Unpack[Options],
) -> CompiledStep: ...


@overload
def compile(
    model: nn.Module,
    comm_fusion: Fusion = ...,
    *,
    loss_fn: LossFn | None = ...,
    optimizer: torch.optim.Optimizer | None = ...,
    form: Literal["step"],
    **options: Unpack[Options],
) -> CompiledStep: ...


@overload
def compile(
    model: nn.Module,
    comm_fusion: Fusion = ...,
    *,
    loss_fn: None = ...,
    optimizer: None = ...,
    form: Literal["module"] | None = ...,
    **options: Unpack[Options],
) -> CompiledModule: ...


@overload
def compile(
    model: nn.Module,
    comm_fusion: Fusion = ...,
    *,
    loss_fn: LossFn | None = ...,
    optimizer: torch.optim.Optimizer | None = ...,
    form: str | None = ...,
    **options: Unpack[Options],
) -> CompiledStep | CompiledModule: ...


@user_frames_only
def compile(
    model: nn.Module,
    comm_fusion: Fusion = not_given(None),
    *,
    loss_fn: LossFn | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    form: str | None = None,
    has_aux: bool = not_given(False),
    return_loss: bool = not_given(True),
    parallel_mode: ParallelMode = not_given("data_parallel"),
    mesh: DeviceMesh | Sequence[int] | None = not_given(None),
    device_num: int | None = not_given(None),
    global_rank: int | None = not_given(None),
    gradients_mean: bool = not_given(True),
    gradient_fp32_sync: bool = not_given(True),
    enable_parallel_optimizer: bool = not_given(False),
    parallel_optimizer_config: ShardedUpdate = not_given(None),
    search_mode: SearchMode = not_given("dynamic_programming"),
    strategy_ckpt_load_file: AnyPath | None = not_given(None),
    strategy_ckpt_load_strict: bool = not_given(False),
    strategy_ckpt_save_file: AnyPath | None = not_given(None),
    full_batch: bool = not_given(False),
    parameter_broadcast: bool = not_given(False),
    broadcast_buffers: bool | None = not_given(False),
    find_unused_parameters: bool = not_given(False),
    capture: Literal["trace", "dynamo"] = not_given("trace"),
    pipeline_stages: int = not_given(1),
    accumulate_steps: int = not_given(1),
    clip_grad_norm: float | None = not_given(None),
    schedule: Literal["overlap", "none", "auto"] | ScheduleConfig = not_given("overlap"),
    replan: bool | TrialLimits = not_given(True),
    memory_limit: int | None = not_given(None),
    backend: Literal["eager", "inductor"] = not_given("eager"),
    inductor_regions: Literal["stretches", "layers"] = not_given("stretches"),
    cuda_graph: bool | Literal["auto"] = not_given("auto"),
    cpu_kernels: bool = not_given(True),
    skip_passes: Sequence[str] = not_given(()),
    cluster: Cluster | None = not_given(None),
    exchange_factors: Literal["never", "auto", "always"] = not_given("never"),
    gradient_compression: object = not_given(None),
    **unknown: object,
) -> CompiledStep | CompiledModule:
    """Compile the training step of `model`, or the model for a training loop of your own.

    With `loss_fn` or `optimizer` the result is a step, called once per training step. With neither it is a module that
    takes the place of DistributedDataParallel: call it, and call `backward()` on what you make of its output.

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
    form: "step" or "module". None: what `loss_fn` and `optimizer` say.
    has_aux: whether `loss_fn`, or the model where there is none, returns a pair of the loss and anything else, such as
        logits and metrics. The step then returns such a pair, with tensors that are detached.
    return_loss: whether a step returns its loss. False: it returns None, or with `has_aux` a pair of None and the
        rest. A call in eval mode returns its loss all the same.
    parallel_mode: "data_parallel", "hybrid_parallel" (parameters and buffers with `layerwise_parallel` are each
        rank's own: no gradient of them is reduced and no value sent), "semi_auto" (parameters and activations are
        divided as `shard` says), "auto" (what `shard` leaves open is searched for the shortest predicted step) or
        "stand_alone" (no collectives).
    mesh: a DeviceMesh or a tuple of sizes. None: one axis over the world.
    device_num, global_rank: compile for this rank of a virtual world of 1 to 4096 ranks. `lower` works then,
        calls do not.
    gradients_mean: whether gradients are averaged over the ranks; False leaves the sum.
    gradient_fp32_sync: whether gradients of a lower precision are summed in float32 and cast back.
    enable_parallel_optimizer: whether each rank updates some rows of each parameter, and holds the optimizer's state of
        these alone. Reading the state then takes all ranks. Optimizers that the compiler has no rule for are refused.
        Where it is not given, parallel_mode="auto" with a memory limit may turn it on.
        A module takes it with levels 2 and 3: each rank keeps its rows of gradients, and of parameters, and
        `ShardedOptimizer` updates them.
    parallel_optimizer_config: a dictionary: "parallel_optimizer_threshold" (KiB that a parameter must have, 64), "pad"
        (whether rows that do not divide are padded), "level" (1 divides the optimizer's state, 2 gradients as well,
        3 parameters as well), "optimizer_weight_shard_size" (how many neighbouring ranks share an update; all),
        "gradient_accumulation_shard" (whether accumulate_steps adds up the rows that a rank updates, in place of whole
        gradients) and "mode" ("broadcast": one rank updates all of a parameter, in place of rows on every rank).
    search_mode: of "auto": "dynamic_programming" takes up to two mesh axes together, and says what is proven of the
        result; "recursive_programming" takes each with the others fixed, until nothing gets cheaper. On one axis both
        are the same exact search. "sharding_propagation" begins with what cf.shard marks and completes it with the
        least communication; axes that no mark names divide the batch.
    strategy_ckpt_save_file: where "auto" writes the strategies that it has found for the training step, as JSON.
    strategy_ckpt_load_file: a file of strategies, which "auto" takes in place of a search. Entries that the model no
        longer has are left out, and `explain()` lists them.
    strategy_ckpt_load_strict: whether such entries are an error instead, and so are parameters without an entry.
    full_batch: whether every rank is handed the global batch and takes its rows of it.
    parameter_broadcast: whether rank 0's parameters are sent to all ranks before the first step. A module sends them,
        and buffers, when it is compiled, unless this is False.
    broadcast_buffers: whether every training step begins with rank 0's buffers (BatchNorm statistics), sent in
        one collective of the graph per dtype. False, and for a step None: each rank keeps its own. A module sends them
        in every backward that reduces, unless this is False.
    find_unused_parameters: for a module: whether parameters that a backward does not reach on some rank are reduced
        all the same, with zeros. One that no rank has reached keeps its `.grad`. False: ranks that reach other
        parameters end the backward with an error that names them.
    capture: "trace", or for a module "dynamo": PyTorch's Dynamo cuts a model whose Python code looks at values of
        tensors into several graphs. Each reduces its gradients in buckets of its own.
    accumulate_steps: for a step with an optimizer: each call is one of so many micro-batches. The last one reduces the
        gradients of all of them and updates; the others send no gradients. Gradients are the mean over the
        micro-batches, so that together they are one batch; with gradients_mean=False they are the sum.
    clip_grad_norm: for a step with an optimizer: the largest 2-norm that all gradients together may have. Those of a
        larger norm are scaled down before the update, as torch.nn.utils.clip_grad_norm_ does it after `backward()`.
    schedule: "overlap", "none", or a ScheduleConfig with a memory limit or with communication across steps. "auto": a
        step of several ranks measures itself while it trains, tries other buckets, other orders and communication
        across steps, and goes on with what measured fastest. It keeps `comm_fusion` where that is given, and
        ScheduleConfig(mode="auto") a memory limit and, with across_steps=False, updates within the step.
    replan: whether a plan may change while a step trains. False: never, as after
        torch.use_deterministic_algorithms(True). A TrialLimits limits the time and the steps that finding it may take.
    memory_limit: bytes that a step may have allocated at most on a device, as its simulation predicts: parameters,
        gradients, optimizer state and activations. It is ScheduleConfig's, and holds for the schedule as well as for
        the strategies that "auto" searches. Where no plan fits, the error says by how much, and what would help.
    backend: "eager" runs the graph op by op. "inductor" lets PyTorch's Inductor compile the compute between starts and
        waits of collectives. The first step then takes as long as with torch.compile, and dropout draws other masks.
    inductor_regions: with backend="inductor", "stretches" compiles what lies between two collectives as a whole.
        "layers" also ends a region where a layer does. Equal layers are then compiled once, which makes the first step
        shorter, and the later ones a little longer.
    cuda_graph: whether a step on a CUDA device runs from a CUDA graph, which holds the forward, the backward, the
        collectives and the update. "auto": after a few steps of one shape, where it can be captured. True: from the
        second step on; a step that cannot be captured raises NotAvailableError. False: never. Steps on a CPU run
        without. The module form has False as its default and captures nothing.
    cpu_kernels: whether passes may rewrite the graph of a CPU step so that its kernels run faster. They lay
        convolutions out channels last, compute the gradients of their weights in ops of their own, and draw
        dropout masks from fewer random bits. Gradients then differ in their last digits.
    skip_passes: the names of passes that are not to run, to find out which one a problem comes from; by default those
        in COMMFUSE_SKIP, as in "overlap,merge_equal". Passes that say what is computed, and passes that others need,
        cannot be left out. The header of the text names what was skipped.
    cluster: what plans are priced with: a ClusterSpec, a StepProfile, the name of a preset or the path of a
        file. "measured", and None where plans need prices: a step of several ranks measures network and nodes while it
        trains with the default plan; then what was asked for is planned with these figures, and stays if it is faster.
        "default", and None where nothing can be measured (a virtual world, one rank): 10 Gbit/s
        between CPU ranks, and nodes of 8 H100 for a model on CUDA. With schedule="auto" a StepProfile that has the name
        of a plan goes on with that plan.

    Raises ConfigTypeError, ConfigKeyError or ConfigValueError (all of them CommFuseError) for bad options.
    Raises NotAvailableError for options that are planned.
    """
    given = dict(locals())
    for name in ("model", "loss_fn", "optimizer", "form", "unknown"):
        del given[name]
    refuse_unknown(unknown)
    check_arguments(model, comm_fusion, loss_fn, optimizer)
    chosen = chosen_form(form, loss_fn, optimizer)
    config = settled(CompileConfig.resolve(given, chosen), given, chosen, optimizer is not None)
    check_cuda_graph(config, model, chosen)
    check_skipped(config.skip_passes)
    compiled: CompiledStep | CompiledModule
    if chosen == "step":
        check_form_of_step(config)
        compiled = CompiledStep(model, loss_fn, optimizer, config)
    else:
        check_form_of_module(config)
        compiled = DynamoModule(model, config) if config.capture == "dynamo" else CompiledModule(model, config)
    warn_of_options(config)
    return compiled
