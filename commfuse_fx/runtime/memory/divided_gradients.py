"""The gradients of divided parameters: a rank holds its rows, and `.grad` is a whole tensor without memory.

When code touches one of these `.grad`, all are gathered from all ranks, and are then ordinary gradients. The update, or
the backward that adds to them, takes its rows from them again.

Why: docs/decisions.md, "A divided module hands out whole tensors without memory".
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from commfuse_fx.errors import CommFuseError
from commfuse_fx.runtime.memory.divided import DividedParameter, HeldPart, allocate, free, gather
from commfuse_fx.runtime.memory.guard import Guard, finish_others
from commfuse_fx.runtime.memory.modes import outside_modes
from commfuse_fx.runtime.ranks.exchange import Exchange

_OWN_REFERENCES = 4
"""Of a tensor that stands for rows: here, in the guard, in a variable, and the argument that counts them."""


class DividedGradients:
    """The gradients of one rank. divided: what divides the parameters, by name. exchange: of these alone."""

    def __init__(self, divided: Mapping[str, DividedParameter], exchange: Exchange) -> None:
        self.exchange = exchange
        self._divided = divided
        self._rows: dict[str, torch.Tensor] = {}
        self._shown: dict[str, torch.Tensor] = {}
        """By the same names, what stands for the rows: `.grad`, unless the user has replaced it."""
        self._spare: dict[str, torch.Tensor] = {}
        self._guard = Guard(_opening(self), alone=False)

    def __contains__(self, name: str) -> bool:
        """Whether the parameter is divided."""
        return name in self._divided

    def holds(self, name: str, gradient: torch.Tensor | None) -> bool:
        """Whether this `.grad` of a parameter stands for rows."""
        return gradient is not None and self._shown.get(name) is gradient

    def rows(self, name: str) -> torch.Tensor:
        """This rank's rows of a gradient that `holds`."""
        return self._rows[name]

    def add(self, name: str, param: nn.Parameter, gradient: torch.Tensor, replaces: bool) -> None:
        """Let `.grad` stand for the rows of this gradient, added to what it has.

        gradient: what ranks have reduced, whole or this rank's rows. replaces: whether it has what a whole `.grad` has.
        """
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            each = self._divided[name]
            rows = gradient if gradient.shape == each.rows else each.part_of_gradient(gradient)
            held = param.grad
            if self.holds(name, held):
                self._rows[name].add_(rows)
                return
            if held is None:
                self._drop(name)
                param.grad = held = self._new(name)
            else:
                rows = rows if replaces else rows.add_(self._taken(each, held))
                self._drop(name)
            self._close(name, rows, held)

    def take(self, name: str, param: nn.Parameter) -> torch.Tensor:
        """This rank's rows of a gradient that there is. A whole `.grad` stands for rows from then on."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            held = param.grad
            assert held is not None, "there is one"
            if not self.holds(name, held):
                rows = self._taken(self._divided[name], held)
                self._drop(name)
                self._close(name, rows, held)
            return self._rows[name]

    def drop_replaced(self, params: Mapping[str, nn.Parameter]) -> None:
        """Let go of rows whose `.grad` the user has replaced, and no longer holds."""
        with torch._C.DisableTorchFunctionSubclass():
            for name in list(self._rows):
                shown = self._shown[name]
                if params[name].grad is not shown and sys.getrefcount(shown) <= _OWN_REFERENCES:
                    self._guard.release(shown)
                    self._spare[name] = shown
                    del self._rows[name], self._shown[name]

    def open(self) -> None:
        """Gather all gradients. All ranks have to call this together; raises CollectiveError if some do not."""
        with self._guard.lock:
            if not self._guard.is_closed:
                return
            self.exchange.meet()
            with outside_modes():
                gather(self.exchange, list(self._pieces()))
            self._guard.open()
            self._rows.clear()
            self._shown.clear()

    def _pieces(self) -> Iterator[tuple[DividedParameter, HeldPart]]:
        for name, rows in self._rows.items():
            each = self._divided[name]
            yield each, each.held_gradient(rows, self._shown[name])

    @contextmanager
    def shapes_only(self) -> Iterator[None]:
        """Inside the `with` block gradients have memory but no values: what traces a parameter looks at its `.grad`."""
        shown = list(self._shown.values())
        self._guard.open()
        try:
            for tensor in shown:
                allocate(tensor)
            yield
        finally:
            for tensor in shown:
                free(tensor)
            self._guard.close(shown)

    def zero(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Fill rows with zeros; returns the parameters whose `.grad` stands for none."""
        names = {id(each.whole): name for name, each in self._divided.items()}
        others: list[nn.Parameter] = []
        with torch.no_grad():
            for param in params:
                name = names.get(id(param), "")
                if self.holds(name, param.grad):
                    self._rows[name].zero_()
                else:
                    others.append(param)
        return others

    def _taken(self, each: DividedParameter, whole: torch.Tensor) -> torch.Tensor:
        finish_others([whole])  # it may stand for the rows of another parameter
        return each.part_of_gradient(whole)

    def _new(self, name: str) -> torch.Tensor:
        each = self._divided[name]
        spare = self._spare.pop(name, None)
        if spare is not None and spare.shape == each.whole.shape and spare.dtype == each.whole.dtype:
            if spare.device == each.whole.device:
                return spare
        return torch.empty_like(each.whole, requires_grad=False)

    def _close(self, name: str, rows: torch.Tensor, shown: torch.Tensor) -> None:
        free(shown)
        self._rows[name], self._shown[name] = rows, shown
        self._guard.close([shown])

    def _drop(self, name: str) -> None:
        """Let go of the rows of a gradient that has been replaced. Whoever still holds it may not read it."""
        if name in self._rows:
            self._guard.release(self._shown[name])
            _gone.mark(self._shown.pop(name))
            del self._rows[name]


def _opening(gradients: DividedGradients) -> Callable[[], None]:
    """What a `.grad` calls. It does not keep alive what divides the parameter: no collection of garbage sees that a
    parameter has a `.grad`, so neither of them would ever be freed."""
    held = weakref.ref(gradients)

    def finish() -> None:
        found = held()
        if found is None:
            raise CommFuseError(
                "this is the .grad of a parameter that was divided among ranks by a compiled module that is gone, and "
                "its values with it: keep what compile() has returned, or copy the gradient (param.grad.clone()) before"
            )
        found.open()

    return finish


def _refuse() -> None:
    raise CommFuseError(
        "this tensor was the .grad of a parameter that is divided among ranks, and has been replaced before anybody "
        "read it, so its values are gone: copy it (param.grad.clone()) before zero_grad()"
    )


_gone = Guard(_refuse)
