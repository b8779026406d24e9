"""What can be the model that is trained, and what people give in its place."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.frontends.arguments_of_ddp import ATTRIBUTES
from commfuse_fx.frontends.stand_in import StandIn
from commfuse_fx.support.checks import show


def check_model(model: object) -> None:
    """Raise unless a module can be traced, with all of its parts. It is the model of `compile`."""
    if isinstance(model, type):
        raise ConfigTypeError(f"model={model.__name__} is a class: pass an instance of it, {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise ConfigTypeError(
            f"model={named(model)} of type {type(model).__name__} is not a torch.nn.Module: pass the module to train"
        )
    for path, module in model.named_modules():
        place = f"model.{path}" if path else "model"
        problem = problem_of(module, place)
        if problem:
            raise ConfigTypeError(f"{place} is {problem}")
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", None)
    if ignored:
        raise ConfigValueError(
            f"model._ddp_params_and_buffers_to_ignore is {show(ignored)}, which only DistributedDataParallel reads: "
            f"{ATTRIBUTES['_set_params_and_buffers_to_ignore_for_model']}, and delete the list"
        )


def problem_of(module: nn.Module, place: str) -> str:
    """Why a module cannot be traced, as the end of a sentence, and what to do; or an empty string."""
    if hasattr(module, "_orig_mod") and hasattr(module, "dynamo_ctx"):
        instead = f"pass {place}._orig_mod" if "." not in place else f"set {place} = {place}._orig_mod"
        return f"compiled with torch.compile, which cannot be traced: {instead}"
    if getattr(module, "_compiled_call_impl", None) is not None:
        return (
            "compiled in place, by its method compile(), which cannot be traced: leave that call out, or undo it with "
            f"{place}._compiled_call_impl = None"
        )
    if isinstance(module, torch.jit.ScriptModule):
        return f"a {type(module).__name__} of TorchScript, which cannot be traced: use the module it was made from"
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return f"wrapped by DistributedDataParallel: use {place}.module, a compiled step reduces gradients itself"
    if isinstance(module, StandIn):
        return f"what compile() has returned before: use {place}.module, each gradient is reduced by one of them only"
    if isinstance(module, nn.DataParallel):
        return f"wrapped by DataParallel: use {place}.module, and start one process for each device, with torchrun"
    if any(each.__module__.startswith("torch.distributed.fsdp") for each in type(module).__mro__):
        return (
            "wrapped by FSDP, which divides its parameters: use the module as it was before, with "
            'parallel_mode="data_parallel", or with "semi_auto" and cf.shard to divide parameters'
        )
    return ""


def named(value: Any) -> str:
    """The value by name; most of these have a repr of many lines."""
    if isinstance(value, (str, bytes, int, float, dict, list, tuple)):
        return show(value)
    return str(getattr(value, "__qualname__", None) or type(value).__name__)
