"""Compute the loss of a call, with a loss function or from the model's own output."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from commfuse_fx.capture.trace.provenance import OriginRecorder
from commfuse_fx.errors import CaptureError, ConfigTypeError

LossFn = Callable[[Any, Any], torch.Tensor]


def name_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any], loss_fn: LossFn | None) -> dict[str, Any]:
    """The call's arguments under the names they have in dumps: `input`, or `input` and `target`."""
    if loss_fn is None:
        return {"input": {"args": args, "kwargs": dict(kwargs)}}
    if not args:
        raise ConfigTypeError(
            "the last positional argument is the target, since compile() was given loss_fn, but step() got "
            f"{f'the keyword arguments {_listed(kwargs)} only, which go to the model' if kwargs else 'none'}: "
            "call step(*inputs, target)"
        )
    return {"input": {"args": args[:-1], "kwargs": dict(kwargs)}, "target": args[-1]}


def compute_loss(
    model: nn.Module,
    arguments: Mapping[str, Any],
    loss_fn: LossFn | None,
    recorder: OriginRecorder,
    has_aux: bool = False,
) -> tuple[torch.Tensor, Any]:
    """Run the model; returns its scalar loss and, with has_aux, the auxiliary output (else None).

    Raises CaptureError if there is no scalar floating-point loss, and ConfigTypeError if the target was left out.
    """
    call = arguments["input"]
    if loss_fn is None:
        output = model(*call["args"], **call["kwargs"])
        if not has_aux:
            return _loss_in(output), None
        loss, aux = _pair(output, "the model")
        return _loss_in(loss), aux
    try:
        output = model(*call["args"], **call["kwargs"])
    except TypeError as error:
        if _fits(model, call["args"], call["kwargs"]):
            raise
        raise _without_target(model, call, arguments["target"]) from error
    aux = None
    with recorder.scope("loss_fn"):
        loss = loss_fn(output, arguments["target"])
        if has_aux:
            loss, aux = _pair(loss, "loss_fn")
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(f"loss_fn returned {_described(loss)}, not a tensor: {_fix_for(loss)}")
    return _check_scalar(loss, "loss_fn returned", "reduce it with .mean() or .sum(), or with reduction='mean'"), aux


def _pair(value: Any, who: str) -> tuple[Any, Any]:
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return value[0], value[1]
    raise CaptureError(f"{who} returned {_described(value)}: with has_aux=True it has to return (loss, anything)")


def _fits(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the model's forward takes such arguments."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a forward that has no signature
        pass
    return True


def _without_target(model: nn.Module, call: Mapping[str, Any], target: Any) -> ConfigTypeError:
    """The error for a call whose inputs the model does not take: nearly always the target was left out."""
    given = _described(target)
    names = f" and the keyword arguments {_listed(call['kwargs'])}" if call["kwargs"] else ""
    return ConfigTypeError(
        f"the last positional argument is the target, since compile() was given loss_fn: here {given} is the target, "
        f"which leaves {len(call['args'])} positional argument(s){names} for {type(model).__name__}.forward"
        f"{_signature(model)}; call step(*inputs, target)"
    )


def _signature(model: nn.Module) -> str:
    return f"({', '.join(inspect.signature(model.forward).parameters)})"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _described(value: Any) -> str:
    """A short description of a value for messages."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return f"{value!r:.60} of type {type(value).__name__}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with the keys {_listed(map(str, value))}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__


def _fix_for(loss: Any) -> str:
    if isinstance(loss, (int, float)):
        return "return the scalar tensor itself, without .item() or float()"
    if loss is None:
        return "return the scalar tensor (is there a `return`?)"
    return "return the loss alone, a scalar tensor, or pass has_aux=True and return (loss, anything)"


def _loss_in(output: Any) -> torch.Tensor:
    fix = "pass loss_fn to compile() if this is not a loss, or reduce it with .mean() or .sum()"
    if isinstance(output, torch.Tensor):
        return _check_scalar(output, "the model returned", fix)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return _check_scalar(loss, "the model's output carries as .loss", "reduce it with .mean() or .sum()")
    raise CaptureError(
        f"the model returned {_described(output)}, which is neither a scalar tensor nor carries one as .loss or "
        '["loss"]: pass loss_fn to compile(), or give the model what it needs to compute its loss (such as labels=)'
    )


def _check_scalar(loss: torch.Tensor, what: str, fix: str) -> torch.Tensor:
    if loss.numel() != 1 or loss.ndim > 1:
        raise CaptureError(f"{what} a tensor of shape {tuple(loss.shape)}, not a scalar loss: {fix}")
    if not loss.is_floating_point():
        raise CaptureError(f"{what} a loss of dtype {loss.dtype}: a loss must be a floating-point tensor")
    return loss
