"""What a step gives to the user besides the loss and the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from commfuse_fx.calls.finished_loss import finished
from commfuse_fx.capture.guards.tree import unflatten
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.runtime.execute.interrupts import interrupts_deferred
from commfuse_fx.runtime.memory.own_storage import separated


def handed_out(plan: Plan, executor: Executor, outputs: Sequence[Any], returns_loss: bool) -> Any:
    """What a call returns, when `.grad` has what the user looks at besides. outputs: those of the program."""
    count, described, program = len(executor.program.grads), plan.compiled.outputs, executor.program
    loss, *others = outputs
    hand_out(executor, others[:count])
    if program.training:
        loss = finished(loss) if returns_loss else None
    return loss if described is None else (loss, unflatten(described.nest, iter(others[count:])))


def hand_out(executor: Executor, grads: Sequence[torch.Tensor]) -> None:
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
