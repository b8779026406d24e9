"""Tells gradients that have been reduced over the ranks from those that have not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from commfuse_fx.errors import NotAvailableError


class GradientParts:
    """Knows of every `.grad` of one model what has become of it.

    A mean of equal means is the same mean, but a sum of equal sums is not: what has been reduced may not go through
    the ranks again, and gradients of one rank may not be added to it.

    sums: whether gradients are summed over the ranks, rather than averaged.
    local: names of parameters whose `.grad` holds what has not been reduced.
    put_aside: takes a sum out of the `.grad` of a parameter, given its name; None: that is an error.
    """

    def __init__(self, sums: bool) -> None:
        self.sums = sums
        self.local: dict[str, None] = {}
        self.put_aside: Callable[[str], None] | None = None

    def is_sum(self, name: str, param: nn.Parameter) -> bool:
        """Whether `.grad` holds a sum over the ranks."""
        return self.sums and param.grad is not None and name not in self.local

    def unreduced(self, params: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor | None]:
        """What each `.grad` holds that is still to be reduced."""
        return {name: None if self.is_sum(name, param) else param.grad for name, param in params.items()}

    def will_be_local(self, names: Sequence[str], params: Mapping[str, nn.Parameter]) -> None:
        """Gradients of this rank are about to be added to `.grad` of the parameters of these names.

        Raises NotAvailableError where it holds a sum over the ranks, and is not put aside.
        """
        for name in names:
            if not self.is_sum(name, params[name]):
                continue
            if self.put_aside is not None:
                self.put_aside(name)
            else:
                self.refuse(name, params[name])

    def refuse(self, name: str, param: nn.Parameter) -> None:
        """Raise NotAvailableError unless the sum over the ranks is zero."""
        if param.grad is not None and bool(param.grad.any()):
            raise NotAvailableError(
                f"gradients_mean=False: .grad of {name} holds a sum over the ranks, and gradients that are not "
                "reduced, as under no_sync(), would be added to it: call zero_grad() before, or leave gradients_mean "
                "out and scale the loss"
            )

    def was_local(self, names: Sequence[str]) -> None:
        """Gradients of this rank have been added."""
        self.local.update(dict.fromkeys(names))

    def was_reduced(self, names: Sequence[str]) -> None:
        """`.grad` of the parameters of these names has been reduced."""
        for name in names:
            self.local.pop(name, None)
