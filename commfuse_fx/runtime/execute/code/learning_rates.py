"""Learning rates in memory of the device, where a captured step finds the present one.

Why: docs/decisions.md, "A learning rate is a number in the graph until it varies".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.meta import tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.runtime.execute.code.rated_updates import (
    at_any_rate,
    dtype_of_rate,
    has_kernel_for_tensors,
    updates_at,
)


class LearningRates:
    """The learning rates of one program. Those that vary are tensors, so a captured step need not be captured again.

    The fused kernels of CUDA read a rate as float32, which rounds it. So a rate that stays what it is remains a number,
    and the parameters equal those of eager PyTorch to the last bit. A rate varies if a scheduler of torch.optim is
    there, or as soon as it has another value. One that the user has in a tensor on the device is read there.

    groups: the `param_groups` of the optimizer.
    kernels: the callables of updates whose op takes the rate as a number only.
    follows: whether rates that vary become tensors, as captured steps need them.
    """

    def __init__(self, program: Program, groups: Sequence[Mapping[str, Any]]) -> None:
        self.follows = False
        self.kernels: dict[fx.Node, Callable[..., None]] = {}
        self._rates: dict[int, _Rate] = {}
        for place, (node, source) in enumerate(program.sources.items()):
            if source.kind != "hyper" or source.name != "lr":
                continue
            updates = updates_at(node)
            if (dtype := dtype_of_rate(updates)) is None:
                continue
            params: Any = next(iter(updates)).args[0]
            device = torch.device(tensor_spec(params[0]).device)
            self._rates[place] = _Rate(groups[program.updates[source.owner].group], dtype, device)
            self.kernels |= {
                update: at_any_rate(update, name)
                for update, name in updates.items()
                if dtype == torch.float64 or not has_kernel_for_tensors(update)
            }

    def takes(self, place: int, rate: torch.Tensor) -> bool:
        """Whether the updates read this rate of the user's from memory, so that no host waits for it."""
        known = self._rates.get(place)
        return known is not None and rate.device == known.device and (self.follows or rate.device.type != "cpu")

    def put_into(self, values: list[Any]) -> None:
        """Replace the rates that vary, among the values of a program's placeholders, by tensors that hold them.

        No device waits for the host here: a tensor whose number has changed is filled in the order of its stream.
        """
        for place, rate in self._rates.items():
            if self.follows:
                values[place] = rate.of(values[place])
            elif isinstance(values[place], torch.Tensor):  # updates that are left to the next step keep this one
                values[place] = rate.copy(values[place])


class _Rate:
    """The learning rate of one param group, and the tensor that holds it if it varies."""

    def __init__(self, group: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self._group = group
        self._dtype = dtype
        self._number: float | None = None
        self._tensor: torch.Tensor | None = None

    def copy(self, rate: torch.Tensor) -> torch.Tensor:
        return rate.detach().to(self._dtype, copy=True).view(())

    def of(self, number: float | torch.Tensor) -> float | torch.Tensor:
        """What the update gets for this number, or for a tensor of the user's that holds it."""
        if isinstance(number, torch.Tensor):
            self._number = None
            return self._memory().copy_(number.detach().view(()))
        if self._tensor is None:
            # Schedulers of torch leave this entry, which goes into checkpoints too.
            if self._number in (None, number) and "initial_lr" not in self._group:
                self._number = number
                return number
            self._number = None
        tensor = self._memory()
        if self._number != number:
            self._number = number
            tensor.fill_(number)
        return tensor

    def _memory(self) -> torch.Tensor:
        if self._tensor is None:
            self._tensor = torch.zeros((), dtype=self._dtype, device=self.device)
        return self._tensor
