"""What a step gives to the user besides the loss and the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.runtime.execute.interrupts import interrupts_deferred
from commfuse_fx.runtime.memory.own_storage import separated


def hand_out(executor: Executor, grads: Sequence[torch.Tensor]) -> None:
    """After a step: what the user looks at besides the loss and the parameters."""
    optimizer: Any = executor.optimizer
    if optimizer is not None and executor.program.training:
        optimizer._opt_called = True  # a learning-rate scheduler looks at it to see that optimizer steps came first
    if grads:
        with interrupts_deferred():
            for name, grad in zip(executor.program.grads, grads, strict=True):
                _accumulate(executor.params[name], grad)


def _accumulate(param: nn.Parameter, grad: torch.Tensor) -> None:
    """As autograd does: the first gradient is kept, later ones are added to it."""
    if param.grad is None:
        param.grad = separated(grad)
    else:
        with torch.no_grad():
            param.grad.add_(grad)
