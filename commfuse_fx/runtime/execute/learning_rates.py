"""Learning rates in memory of the device, where a captured step finds the present one."""

from __future__ import annotations

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
    """The learning rates of one program, each a tensor of one float32, since the kernels of CUDA read just that.

    An update of float64 parameters gets the number as it is, which float32 would round.
    """

    def __init__(self, program: Program, device: torch.device) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        self._written: dict[int, float] = {}
        for place, (node, source) in enumerate(program.sources.items()):
            if (
                source.kind == "hyper"
                and source.name == "lr"
                and all(_takes_tensor(user, device) for user in node.users)
            ):
                self._tensors[place] = torch.zeros((), dtype=torch.float32, device=device)

    def put_into(self, values: list[Any]) -> None:
        """Replace the numbers among the values of a program's placeholders by tensors that hold them.

        No device waits for the host here: a tensor whose number has changed is filled in the order of its stream.
        """
        for place, tensor in self._tensors.items():
            if self._written.get(place) != values[place]:
                self._written[place] = values[place]
                tensor.fill_(values[place])
            values[place] = tensor


def _takes_tensor(update: fx.Node, device: torch.device) -> bool:
    overload = _TAKES_TENSOR.get(update.target)
    if overload is None or not torch._C._dispatch_has_kernel_for_dispatch_key(overload, device.type.upper()):
        return False
    params: Any = update.args[0]
    return all(getattr(info(param).spec, "dtype", None) != torch.float64 for param in params)
