"""Learning rates in memory of the device, where a captured step finds the present one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.meta import info
from commfuse_fx.ir.program import Program

aten = torch.ops.aten

_TAKES_TENSOR: dict[Any, str] = {
    aten._fused_adagrad_.default: "aten::_fused_adagrad_.tensor_lr",
    aten._fused_adam_.default: "aten::_fused_adam_.tensor_lr",
    aten._fused_adamw_.default: "aten::_fused_adamw_.tensor_lr",
    aten._fused_sgd_.default: "aten::_fused_sgd_.tensor_lr",
}
"""Updates that take the learning rate as a tensor too, with the names of those overloads."""


class LearningRates:
    """The learning rates of one program. Those that vary are tensors, so a captured step need not be captured again.

    The kernels of CUDA read a rate as float32, which rounds it. So a rate that stays what it is remains a number, and
    the parameters equal those of eager PyTorch to the last bit. A rate varies if a scheduler of torch.optim is there,
    or as soon as it has another value, or if the user has it in a tensor on the device. For float64 parameters it is
    always a number.

    groups: the `param_groups` of the optimizer.
    """

    def __init__(self, program: Program, groups: list[dict[str, Any]], device: torch.device) -> None:
        self._device = device
        self._rates: dict[int, _Rate] = {}
        for place, (node, source) in enumerate(program.sources.items()):
            is_rate = source.kind == "hyper" and source.name == "lr"
            if is_rate and all(_takes_tensor(user, device) for user in node.users):
                self._rates[place] = _Rate(groups[program.updates[source.owner].group], device)

    def takes(self, place: int, rate: torch.Tensor) -> bool:
        """Whether the updates read this rate of the user's from memory, so that no host has to."""
        return place in self._rates and rate.device == self._device

    def put_into(self, values: list[Any]) -> None:
        """Replace the numbers that vary, among the values of a program's placeholders, by tensors that hold them.

        No device waits for the host here: a tensor whose number has changed is filled in the order of its stream.
        """
        for place, rate in self._rates.items():
            values[place] = rate.of(values[place])


class _Rate:
    """The learning rate of one param group."""

    def __init__(self, group: Mapping[str, Any], device: torch.device) -> None:
        self._group = group
        self._device = device
        self._number: float | None = None
        self._tensor: torch.Tensor | None = None

    def of(self, number: float | torch.Tensor) -> float | torch.Tensor:
        """What the update gets for this number, or for a tensor of the user's that holds it."""
        if isinstance(number, torch.Tensor):
            self._number = None
            if self._tensor is None:
                self._tensor = torch.zeros((), dtype=torch.float32, device=self._device)
            return self._tensor.copy_(number.detach().view(()))
        if self._tensor is None:
            # Schedulers of torch leave this entry, which goes into checkpoints too.
            if self._number in (None, number) and "initial_lr" not in self._group:
                self._number = number
                return number
            self._number, self._tensor = None, torch.zeros((), dtype=torch.float32, device=self._device)
        if self._number != number:
            self._number = number
            self._tensor.fill_(number)
        return self._tensor


def _takes_tensor(update: fx.Node, device: torch.device) -> bool:
    overload = _TAKES_TENSOR.get(update.target)
    if overload is None or not torch._C._dispatch_has_kernel_for_dispatch_key(overload, device.type.upper()):
        return False
    params: Any = update.args[0]
    return all(getattr(info(param).spec, "dtype", None) != torch.float64 for param in params)
