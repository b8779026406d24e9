"""Copies of a model and its optimizer for the other ranks of a world that runs in one process."""

from __future__ import annotations

import copy

import torch
from torch import nn


def copy_for_rank(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """A deep copy. Tensors that modules keep from an earlier forward (the weight that `weight_norm` computes) come
    without their history, which torch refuses to copy."""
    memo: dict[int, object] = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    }
    return copy.deepcopy((model, optimizer), memo)
