"""Tells gradients that have been reduced over the ranks from those that have not."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

import torch
from torch import nn

from commfuse_fx.errors import NotAvailableError
from commfuse_fx.runtime.execute.interrupts import interrupts_deferred
from commfuse_fx.runtime.memory.divided_gradients import DividedGradients

_GRAD = attrgetter("grad")


class GradientParts:
    """Knows of every `.grad` of one model what has become of it.

    A mean of equal means is the same mean, but a sum of equal sums is not: what has been reduced may not go through
    the ranks again, and gradients of one rank may not be added to it. The same holds for a mean that counts ranks
    without batches, in the backward that has computed it.

    sums: whether gradients are summed over the ranks, rather than averaged.
    local: names of parameters whose `.grad` holds what has not been reduced.
    counts_absent: whether means count ranks without batches now. means: names of parameters whose `.grad` holds such a
        mean.
    put_aside: takes what is final out of the `.grad` of a parameter, given its name; None: that is an error.
    rows: of a module that divides its parameters, the gradients of which this rank holds rows. They are final, and so
        is every other `.grad` there as long as nobody has changed it since it was reduced.
    """

    rows: DividedGradients | None = None

    def __init__(self, sums: bool) -> None:
        self.sums = sums
        self.local: dict[str, None] = {}
        self.counts_absent = False
        self.means: dict[str, None] = {}
        self.put_aside: Callable[[str], None] | None = None
        self._reduced: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}

    def is_final(self, name: str, param: nn.Parameter) -> bool:
        """Whether `.grad` holds what may not go through the ranks again."""
        if param.grad is None:
            return False
        if self.rows is not None and self.rows.holds(name, param.grad):
            return True
        return name not in self.local if self.sums else name in self.means

    def goes_again(self, name: str, param: nn.Parameter) -> bool:
        """Whether the next reduction takes what `.grad` holds along."""
        if param.grad is None or self.is_final(name, param):
            return False
        reduced = None if self.rows is None or name in self.local else self._reduced.get(name)
        return reduced is None or reduced[0]() is not param.grad or reduced[1] != param.grad._version

    def unreduced(self, params: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor | None]:
        """What each `.grad` holds that is still to be reduced."""
        return {name: param.grad if self.goes_again(name, param) else None for name, param in params.items()}

    def has_unreduced(self, params: Mapping[str, nn.Parameter]) -> bool:
        """Whether some `.grad` holds what is still to be reduced."""
        held = [name for name, grad in zip(params, map(_GRAD, params.values()), strict=True) if grad is not None]
        return any(self.goes_again(name, params[name]) for name in held)

    def will_be_local(self, names: Sequence[str], params: Mapping[str, nn.Parameter]) -> None:
        """Gradients of this rank are about to be added to `.grad` of the parameters of these names.

        Raises NotAvailableError where it holds what is final, and that is not put aside.
        """
        if self.rows is not None and any(self.rows.holds(name, params[name].grad) for name in names):
            self.rows.open()  # those of this rank are whole
        for name in names:
            if not self.is_final(name, params[name]):
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
        for name in names:
            self.local[name] = None
            self.means.pop(name, None)

    def was_reduced(self, names: Sequence[str], params: Mapping[str, nn.Parameter]) -> None:
        """`.grad` of the parameters of these names has been reduced."""
        if self.rows is not None:
            for name in names:
                grad = params[name].grad
                if name not in self.rows and grad is not None:
                    self._reduced[name] = weakref.ref(grad), grad._version
        if self.local:
            for name in names:
                self.local.pop(name, None)
        if self.counts_absent:
            self.means.update(dict.fromkeys(names))


def write_gradients(
    params: Mapping[str, nn.Parameter], grads: Mapping[str, torch.Tensor], mode: str, parts: GradientParts
) -> None:
    """Let `.grad` hold them, as the backward of eager PyTorch does: an existing `.grad` stays the same tensor.

    mode: what has become of them, as in `Situation`. parts: what each `.grad` has held so far.
    """
    with torch.no_grad(), interrupts_deferred():
        for name, grad in grads.items():
            param = params[name]
            goes_again = mode == "accumulated" and parts.goes_again(name, param)
            if mode != "local" and parts.rows is not None and name in parts.rows:
                parts.rows.add(name, param, grad, replaces=goes_again)
            elif param.grad is None:
                param.grad = grad
            elif goes_again:
                param.grad.copy_(grad)
            else:
                param.grad.add_(grad)


def zero_gradients(params: Iterable[nn.Parameter], parts: GradientParts, set_to_none: bool) -> None:
    """Let every `.grad` be None, or hold zeros. Of those that stand for rows, rows are filled."""
    left = list(params)
    if parts.rows is not None and not set_to_none:
        left = parts.rows.zero(left)
    for param in left:
        if param.grad is None:
            continue
        if set_to_none:
            param.grad = None
            continue
        if param.grad.grad_fn is not None:
            param.grad.detach_()
        else:
            param.grad.requires_grad_(False)
        param.grad.zero_()
