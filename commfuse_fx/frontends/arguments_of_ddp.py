"""What DistributedDataParallel takes and has, and `compile` and its modules do not: each with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed import _composable_state

from commfuse_fx.config.options import DEFAULTS
from commfuse_fx.errors import ConfigKeyError, ConfigValueError
from commfuse_fx.support.checks import alternatives, show

INSTEAD: Mapping[str, str] = {
    "module": "it is the first argument, model",
    "device_ids": "move the model to its device first (model.to(device)); leave it out",
    "output_device": "the output is where the model computes it; leave it out",
    "dim": "batches are not scattered over devices of one process; leave it out",
    "init_sync": "use parameter_broadcast",
    "process_group": "gradients are reduced over all ranks; pass mesh= for another grid of all of them",
    "bucket_cap_mb": 'use comm_fusion={"allreduce": {"mode": "size", "config": MIB}}',
    "check_reduction": "it does nothing in DistributedDataParallel either; leave it out",
    "gradient_as_bucket_view": "gradients are parts of buckets where that is safe; leave it out",
    "static_graph": "the backward is compiled, and compiled again when the model changes; leave it out",
    "delay_all_reduce_named_params": "what is sent last follows from comm_fusion and schedule; leave it out",
    "param_to_hook_all_reduce": "what is sent last follows from comm_fusion and schedule; leave it out",
    "mixed_precision": "run the model under torch.autocast; gradient_fp32_sync is about the sums of gradients",
    "device_mesh": "use mesh",
    "skip_all_reduce_unused_params": "use find_unused_parameters",
    "bucket_cap_mb_list": 'use comm_fusion={"allreduce": {"mode": "index", "config": [FIRST_OF_EACH_BUCKET]}}',
    "batched_grad_copy": "gradients are computed in their buckets where that is safe; leave it out",
    "forward_sync_buffers": "use broadcast_buffers; they are sent in the backward",
    "lazy_bucket_allocation": "the compiler plans the memory of buckets; leave it out",
}
"""Argument -> what to do with it."""

_FOR_GOOD = "it is an argument of compile(), and holds for good"
_INSIDE = "it is a part of how DistributedDataParallel works inside"
_PLANNED = "what is sent together is planned: see comm_fusion"

ATTRIBUTES: Mapping[str, str] = {
    "broadcast_buffers": _FOR_GOOD,
    "find_unused_parameters": _FOR_GOOD,
    "require_forward_param_sync": "buffers are sent in each backward that reduces; leave it out",
    "forward_sync_buffers": INSTEAD["forward_sync_buffers"],
    "will_sync_module_buffers": "buffers are sent in each backward that reduces; leave it out",
    "_sync_buffers": "buffers are sent in each backward that reduces; leave it out",
    "modules_buffers": "use buffers()",
    "named_module_buffers": "use named_buffers()",
    "reducer": "for reducer.prepare_for_backward([]) use `with model.sync_in_backward():`; the rest is in its graph",
    "process_group": "use join_process_group; gradients are reduced over all ranks",
    "device_ids": "the model stays on the device where it is; ask its parameters",
    "output_device": "the model stays on the device where it is; ask its parameters",
    "static_graph": INSTEAD["static_graph"],
    "_set_static_graph": INSTEAD["static_graph"],
    "mixed_precision": INSTEAD["mixed_precision"],
    "gradient_as_bucket_view": INSTEAD["gradient_as_bucket_view"],
    "bucket_bytes_cap": _PLANNED,
    "bucket_bytes_cap_list": _PLANNED,
    "bucket_bytes_cap_default": _PLANNED,
    "broadcast_bucket_size": _PLANNED,
    "_comm_hooks": "register_comm_hook says what to do",
    "_register_builtin_comm_hook": "register_comm_hook says what to do",
    "_register_fused_optim": "use a step, cf.compile(model, loss_fn=..., optimizer=...), which has the update",
    "_get_ddp_logging_data": "use lower(...).explain() for what is sent, and step times of your own",
    "_set_ddp_runtime_logging_sample_rate": "nothing is sampled; leave it out",
    "parameters_to_ignore": "see _set_params_and_buffers_to_ignore_for_model",
    "_set_params_and_buffers_to_ignore_for_model": (
        'mark each with layerwise_parallel = True and pass parallel_mode="hybrid_parallel"'
    ),
    "scatter": _INSIDE,
    "gather": _INSIDE,
    "to_kwargs": _INSIDE,
    "require_manual_backward_finalization": "a backward has waited for its communication when it returns",
    "should_finalize_after_backward": "a backward has waited for its communication when it returns",
    "finalize_backward": "a backward has waited for its communication when it returns",
}
"""Attribute -> what to do in its place, where the model has none of that name."""


_OF_TORCH_COMPILE: Mapping[str, str] = {
    "dynamic": 'a size that changes gets a graph for any size, with capture="dynamo" by itself; for one at once use '
    'torch.compile(model, backend="commfuse", dynamic=True)',
    "fullgraph": 'leave capture out for one graph of the whole model, or use capture="dynamo" for several',
    "mode": "leave it out",
    "options": "give the options themselves, as arguments",
    "disable": "leave it out, and call the model itself in place of what compile() returns",
}
"""Argument of torch.compile -> what to do with it."""


def refuse_unknown(given: Mapping[str, object]) -> None:
    """Raise ConfigKeyError for keyword arguments that `compile` does not have."""
    for name in given:
        if name in INSTEAD:
            raise ConfigKeyError(f"{name} is an argument of DistributedDataParallel, not of compile(): {INSTEAD[name]}")
        if name in _OF_TORCH_COMPILE:
            raise ConfigKeyError(f"{name} is an argument of torch.compile, not of compile(): {_OF_TORCH_COMPILE[name]}")
        known = ("loss_fn", "optimizer", "form", *DEFAULTS)
        raise ConfigKeyError(f"{show(name)} is not an option of compile(){alternatives(name, known)}")


def refuse_wrappers(compiled: nn.Module, model: nn.Module) -> None:
    """Raise where DistributedDataParallel or FSDP has been put around a compiled module, or into its model: gradients
    would be reduced twice."""
    if is_in_ddp():
        raise ConfigValueError(
            "a compiled module runs inside of DistributedDataParallel, which would reduce its gradients a second time: "
            "use what cf.compile() returned as it is. Accelerate, Trainer and Fabric wrap the model that they prepare: "
            "docs/coming-from-ddp.md shows how to hand them one that is compiled"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ConfigValueError(
                f"{name} of a compiled module is wrapped by DistributedDataParallel, which would reduce its gradients "
                "a second time: take the wrapper away"
            )
    for wrapped in _modules_of_fsdp():
        if any(module is compiled for module in wrapped.modules()):
            raise ConfigValueError(
                f"a compiled module runs inside of a {type(wrapped).__name__}, which fully_shard has made: it divides "
                "and reduces gradients itself. Use the compiled module without FSDP"
            )
    for name, param in model.named_parameters():
        with torch._C.DisableTorchFunctionSubclass():  # reads no value: those of divided parameters are with all ranks
            is_flat, kind = getattr(param, "_is_flat_param", False), type(param.data)
        if is_flat or kind is not torch.Tensor:
            raise ConfigValueError(
                f"parameter {name} of a compiled module is a {kind.__name__} of FSDP, which divides and "
                "reduces it itself: use the compiled module without FSDP"
            )
    refuse_parts_of_flat_parameters(model)


def refuse_parts_of_flat_parameters(model: nn.Module) -> None:
    """Raise ConfigValueError where FullyShardedDataParallel has put parts of a flat parameter of its own in place of
    the parameters of a compiled module, as it does around one."""
    for path, module in model.named_modules():
        for name, value in (*vars(module).items(), *module._parameters.items()):
            if isinstance(value, torch.Tensor) and _is_part_of_flat(value):
                raise ConfigValueError(
                    "a compiled module runs inside of FullyShardedDataParallel, which divides and reduces its "
                    f"{f'{path}.' if path else ''}{name} itself: use the compiled module without FSDP"
                )


def _is_part_of_flat(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():  # which may refuse to be asked
        return getattr(tensor._base, "_is_flat_param", False)


def refuse_running_ddp() -> None:
    """Raise ConfigValueError where a graph of the backend runs in the forward of DistributedDataParallel."""
    if is_in_ddp():
        raise ConfigValueError(
            'torch.compile(backend="commfuse") runs inside of DistributedDataParallel, which would reduce gradients a '
            "second time: compile the model itself, without DistributedDataParallel"
        )


def refuse_ddp(model: nn.Module) -> None:
    """Raise ConfigValueError where code that the backend compiles holds a DistributedDataParallel."""
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ConfigValueError(
            'torch.compile(backend="commfuse") compiles code that has a DistributedDataParallel, and both would reduce '
            "its gradients: call the model itself there, without DistributedDataParallel"
        )


def refuse_fsdp(model: nn.Module, params: Sequence[nn.Parameter]) -> None:
    """Raise ConfigValueError where FSDP divides a part of the model that holds one of these parameters."""
    wanted = set(map(id, params))
    for module in model.modules():
        if any(each.__name__ in ("FSDPModule", "FullyShardedDataParallel") for each in type(module).__mro__):
            if not wanted.isdisjoint(map(id, module.parameters())):
                raise ConfigValueError(
                    f'torch.compile(backend="commfuse") compiles a {type(module).__name__} of FSDP, which divides and '
                    "reduces gradients itself: use the model without FSDP, or another backend"
                )


def count_of_fsdp() -> int:
    """How many modules `fully_shard` has a state of."""
    return len(getattr(_composable_state, "_module_state_mapping", ()))


def is_in_ddp() -> bool:
    """Whether the forward of a DistributedDataParallel runs."""
    return nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None


def _modules_of_fsdp() -> list[nn.Module]:
    """The modules that `fully_shard` has been called with. It keeps them where it keeps the state of each."""
    known = getattr(_composable_state, "_module_state_mapping", {})
    return [module for module in list(known) if any("FSDP" in each.__name__ for each in type(module).__mro__)]
