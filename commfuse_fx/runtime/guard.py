"""Let nobody see values that are about to change: tensors that finish a pending update when they are touched.

While an update is still to come, the parameters and states it will write get a subclass of their own
class, whose `__torch_function__` first finishes the update and gives them their class back. Nothing is copied,
and a tensor that nobody touches between two steps costs nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

# What may be asked of a tensor without looking at its values; `optimizer.zero_grad()` needs some of it.
_HARMLESS = frozenset(
    [
        *(
            getattr(torch.Tensor, name).__get__
            for name in (
                "grad",
                "requires_grad",
                "shape",
                "dtype",
                "device",
                "layout",
                "ndim",
                "is_leaf",
                "grad_fn",
                "is_cuda",
                "is_cpu",
                "itemsize",
                "nbytes",
            )
        ),
        torch.Tensor.grad.__set__,  # type: ignore[union-attr]
        torch.Tensor.__hash__,
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.stride,
        torch.Tensor.element_size,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.is_floating_point,
        torch.is_complex,
    ]
)


class Guard:
    """Calls `finish` before anybody else touches a guarded tensor. `finish` has to call `open`.

    Touching a tensor of one guard finishes what is behind all of them: an op may well take tensors of two models.
    An alias that the user made earlier (`param.data`, a view) is not guarded: it shows the old values until
    something finishes the update.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._guarded: list[tuple[torch.Tensor, type]] = []

    def close(self, tensors: Iterable[torch.Tensor]) -> None:
        """Guard these tensors from now on."""
        for tensor in tensors:
            own = type(tensor)
            tensor.__class__ = _pending_class(own)
            self._guarded.append((tensor, own))
        _closed[self] = None

    def open(self) -> None:
        """Give all tensors their own class back."""
        for tensor, own in self._guarded:
            tensor.__class__ = own
        self._guarded.clear()
        _closed.pop(self, None)

    @property
    def is_closed(self) -> bool:
        return bool(self._guarded)


_closed: dict[Guard, None] = {}


def _finish_all() -> None:
    for guard in list(_closed):
        guard._finish()


@cache
def _pending_class(own: type) -> type:
    class Pending(own):  # type: ignore[misc]
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in _HARMLESS:
                _finish_all()
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            _finish_all()
            return copy.deepcopy(self, memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            _finish_all()
            return self.__reduce_ex__(protocol)

    Pending.__name__ = Pending.__qualname__ = own.__name__
    Pending.__module__ = own.__module__
    return Pending
