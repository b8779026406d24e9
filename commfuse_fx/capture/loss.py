"""How a call's arguments become a loss: with a loss function, or from the model's own output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from commfuse_fx.capture.provenance import OriginRecorder
from commfuse_fx.errors import CaptureError, ConfigTypeError

LossFn = Callable[[Any, Any], torch.Tensor]


def name_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any], loss_fn: LossFn | None) -> dict[str, Any]:
    """The call's arguments under the names they have in dumps: `input`, or `input` and `target`."""
    if loss_fn is None:
        return {"input": {"args": args, "kwargs": dict(kwargs)}}
    if not args:
        raise ConfigTypeError(
            "step() needs the target as its last positional argument because compile() was given loss_fn"
        )
    return {"input": {"args": args[:-1], "kwargs": dict(kwargs)}, "target": args[-1]}


def argument_path(path: str) -> str:
    """`input.0`, `input.mask` and `target` from the paths of the flattened arguments."""
    return path.removeprefix(".").replace("input.args.", "input.").replace("input.kwargs.", "input.")


def compute_loss(
    model: nn.Module, arguments: Mapping[str, Any], loss_fn: LossFn | None, recorder: OriginRecorder
) -> torch.Tensor:
    """Run the model and return its scalar loss. Raises CaptureError for anything that is not one."""
    call = arguments["input"]
    output = model(*call["args"], **call["kwargs"])
    if loss_fn is None:
        return _loss_in(output)
    with recorder.scope("loss_fn"):
        loss = loss_fn(output, arguments["target"])
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(f"loss_fn returned {type(loss).__name__}, not a tensor: return a scalar tensor")
    return _check_scalar(loss, "loss_fn returned")


def _loss_in(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return _check_scalar(output, "the model returned")
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return _check_scalar(loss, "the model's output carries as .loss")
    raise CaptureError(
        f"the model returned {type(output).__name__}, which is neither a scalar tensor nor carries one as .loss or "
        '["loss"]: pass loss_fn to compile(), or give the model what it needs to compute its loss (such as labels=)'
    )


def _check_scalar(loss: torch.Tensor, what: str) -> torch.Tensor:
    if loss.numel() != 1 or loss.ndim > 1:
        raise CaptureError(
            f"{what} a tensor of shape {tuple(loss.shape)}, not a scalar loss: pass loss_fn to compile() "
            "if this is not a loss, or reduce it with .mean() or .sum()"
        )
    if not loss.is_floating_point():
        raise CaptureError(f"{what} a loss of dtype {loss.dtype}: a loss must be a floating-point tensor")
    return loss
