"""What micro-batches leave of gradients for the one that updates."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from commfuse_fx.ir.meta import TensorSpec


class HeldGradients:
    """One tensor for each parameter: the sum of the gradients of the micro-batches since the last update.

    All graphs of a step on one rank share them.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[weakref.ref[nn.Parameter], torch.Tensor]] = {}

    def of(self, name: str, param: nn.Parameter, spec: TensorSpec) -> torch.Tensor:
        """What is held of this parameter, in this layout. Of one that has nothing yet, zeros."""
        owner, found = self._held.get(name, (None, None))
        is_its_own = owner is not None and owner() is param and found is not None and found.shape == spec.shape
        if is_its_own and found is not None and TensorSpec.of(found) == spec:
            return found
        made = spec.empty()
        with torch.no_grad():
            if is_its_own and found is not None:
                made.copy_(found)
            else:
                made.zero_()
        self._held[name] = weakref.ref(param), made
        return made

    def clear(self) -> None:
        """Begin with zeros."""
        if tensors := [tensor for _, tensor in self._held.values()]:
            with torch.no_grad():
                torch._foreach_zero_(tensors)
