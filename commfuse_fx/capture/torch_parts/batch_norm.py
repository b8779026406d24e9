"""Batch norms whose updates of running statistics are visible in the graph, unlike in the schemas of torch's ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """native_batch_norm with explicit copies into the running statistics, which its schema does not mention."""
    if not training or running_mean is None or running_var is None:
        return NotImplemented  # type: ignore[no-any-return]
    out, mean, invstd, new_mean, new_var = aten._native_batch_norm_legit_functional(
        x, weight, bias, running_mean, running_var, training, momentum, eps
    )
    running_mean.copy_(new_mean)
    running_var.copy_(new_var)
    return out, mean, invstd


def _cudnn_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not training or running_mean is None or running_var is None:
        return NotImplemented
    out, mean, invstd = _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)
    return out, mean, invstd, x.new_empty((0,), dtype=torch.uint8)


def _cudnn_batch_norm_backward(
    x: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    mean: torch.Tensor | None,
    invstd: torch.Tensor | None,
    eps: float,
    reserve: torch.Tensor,
) -> Any:
    return aten.native_batch_norm_backward(
        grad, x, weight, running_mean, running_var, mean, invstd, True, eps, [True, True, True]
    )


BATCH_NORMS: Mapping[Any, Callable[..., Any]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
}


def statistics_of(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a node writes without a word of it in its schema."""
    if node.target not in (aten.native_batch_norm.default, aten.cudnn_batch_norm.default):
        return []
    return [value for value in node.args[3:5] if isinstance(value, fx.Node)]
