"""Gradients as a model of their own: what is planned, voted on and sent for a model serves to reduce them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from commfuse_fx.capture.graph_of_dynamo import register

COUNTS = "reached_parameters"
"""The name of the parameter that counts which of the others a rank has reached."""


class GradientsAsModel(nn.Module):
    """A model whose outputs are its parameters, so that gradients of the outputs are those to reduce.

    Its parameters stand for those of the user, whose hooks have run already.
    reached: None, or a parameter that counts which of the others a rank has reached.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        reached: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        for name, param in params.items():
            register(self, name, _stand_in(param))
        for name, buffer in buffers.items():
            register(self, name, buffer)
        if reached is not None:
            register(self, COUNTS, reached)

    def hold(self, params: Mapping[str, nn.Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
        """Stand for these parameters, and send these buffers, from now on: some may have been replaced."""
        for name, tensor in (*params.items(), *buffers.items()):
            part, _, leaf = name.rpartition(".")
            holder = self.get_submodule(part)
            held = getattr(holder, leaf)
            if name in buffers and held is not tensor:
                setattr(holder, leaf, tensor)
            elif name in params and not _stands_for(held, params[name]):
                setattr(holder, leaf, _stand_in(params[name]))

    def forward(self) -> list[torch.Tensor]:
        return [param.view_as(param) for param in self.parameters()]


def _stand_in(param: nn.Parameter) -> nn.Parameter:
    found = nn.Parameter(param.detach())
    found.__dict__ = param.__dict__  # the marks
    return found


def _stands_for(one: torch.Tensor, param: nn.Parameter) -> bool:
    return one.__dict__ is param.__dict__ and one.data_ptr() == param.data_ptr() and one.dtype == param.dtype
