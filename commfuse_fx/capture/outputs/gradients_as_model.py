"""Gradients as a model of their own: what is planned, voted on and sent for a model serves to reduce them.

Why: docs/decisions.md, "What no graph has reduced is reduced at the end of the backward".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from commfuse_fx.capture.dynamo.graph_of_dynamo import register


class GradientsAsModel(nn.Module):
    """A model whose outputs are its parameters, so that gradients of the outputs are those to reduce.

    Its parameters stand for those of the user, whose hooks run where the gradients are computed.
    tensors: the parameters, and the buffers to send, by name.
    order: names of parameters, in the order of the outputs; empty: all, in that of the model.
    by_autograd: why autograd computes the gradients while they are sent; "": all are there when the backward begins.
    shares: whether its parameters have the memory of the user's, which may be released where it is False.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        order: Sequence[str] = (),
        by_autograd: str = "",
        shares: bool = True,
    ) -> None:
        super().__init__()
        self._shares = shares
        self._order = tuple(order)
        self._by_autograd = by_autograd
        for name, tensor in tensors.items():
            register(self, name, _stand_in(tensor, shares))

    def hold(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Stand for these from now on: some may have been replaced."""
        for name, tensor in tensors.items():
            path, _, leaf = name.rpartition(".")
            holder = self.get_submodule(path)
            if not _stands_for(getattr(holder, leaf), tensor, self._shares):
                setattr(holder, leaf, _stand_in(tensor, self._shares))

    def forward(self) -> list[torch.Tensor]:
        """The parameters."""
        params = map(self.get_parameter, self._order) if self._order else self.parameters()
        return [param.view_as(param) for param in params]


def why_by_autograd(model: nn.Module) -> str:
    """Why autograd computes the gradients that this model stands for; "" for any other model."""
    return model._by_autograd if isinstance(model, GradientsAsModel) else ""


def _stand_in(tensor: torch.Tensor, shares: bool) -> torch.Tensor:
    if not isinstance(tensor, nn.Parameter):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        found = nn.Parameter(tensor.detach() if shares else torch.empty_like(tensor), tensor.requires_grad)
    found.__dict__ = tensor.__dict__  # the marks
    return found


def _stands_for(held: torch.Tensor, tensor: torch.Tensor, shares: bool) -> bool:
    if not isinstance(tensor, nn.Parameter):
        return held is tensor
    if not shares:
        return held.__dict__ is tensor.__dict__ and held.shape == tensor.shape and held.dtype == tensor.dtype
    same = held.__dict__ is tensor.__dict__ and held.requires_grad == tensor.requires_grad
    return same and held.data_ptr() == tensor.data_ptr() and held.dtype == tensor.dtype
