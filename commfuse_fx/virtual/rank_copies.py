"""Copies of a model and its optimizer for the other ranks of a world that runs in one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from commfuse_fx.ir.core.meta import TensorSpec
from commfuse_fx.ir.ops.shared_memory import overlaps


def copy_for_rank(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """A deep copy of a model and its optimizer.

    Modules may keep tensors of an earlier forward, such as the weight that `weight_norm` computes. Torch refuses to
    copy those with their autograd history, so they are copied without it.
    """
    memo: dict[int, Any] = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    }
    _copy_in_place(model, memo)
    return copy.deepcopy((model, optimizer), memo)


def _copy_in_place(model: nn.Module, memo: dict[int, Any]) -> None:
    """Copy parameters that have gaps or share memory as they are. Torch would make them dense and separate."""
    shared = overlaps(dict([*model.named_parameters(), *model.named_buffers()]))
    for name, param in model.named_parameters():
        if type(param) is nn.Parameter and param.layout == torch.strided:
            if name in shared or not TensorSpec.of(param).is_dense:
                memo[id(param)] = nn.Parameter(copy.deepcopy(param.data, memo), param.requires_grad)
