"""Guarded tensors finish a pending update before anybody reads or writes them.

While an update is pending, the parameters and states that it will write get a subclass of their own class. Its
`__torch_function__` first finishes the update and gives them their class back. Nothing is copied, and tensors that
nobody touches between two steps cost nothing.

Why: docs/decisions.md, "Pending parameters change their class for a while".
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from commfuse_fx.runtime.ranks.forks import followers
from commfuse_fx.support.tracebacks import shorten, user_frames_only

# Functions that do not read or write the values of a tensor. `optimizer.zero_grad()` calls some of them.
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
                "is_sparse",
                "itemsize",
                "nbytes",
                "_version",
                "_backward_hooks",
                "_post_accumulate_grad_hooks",
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


# `nn.Parameter(tensor)` calls detach() for classes that it does not know, and requires that the result has the tensor's
# class. The update is finished by then, so the tensor has its own class again, and the result must get it too.
_PARAMETER_OF = nn.Parameter.__new__.__code__


class Guard:
    """A guard calls `finish` before code outside of the step touches one of its tensors.

    `finish` has to call `open`, or to raise. An op on tensors of several guards calls `finish` of each. An alias that
    the user made earlier (`param.data`, a view) is not guarded: it shows the old values until the update is finished.
    Functions that never call `__torch_function__`, such as `torch.tensor`, see the old values too.

    finish: completes the pending work.
    alone: whether a rank can finish without the other ranks. Then the work is finished before a fork.
    lock: held while pending work is left or finished, since any thread may touch a tensor. The thread that holds it may
        wait for other ranks. Locks nest in one order: first that of divided parameters, then that of their updates.
    """

    def __init__(self, finish: Callable[[], None], alone: bool = True) -> None:
        self.finish = finish
        self.alone = alone
        self.lock = threading.RLock()
        self._guarded: list[tuple[torch.Tensor, type]] = []
        self._classes: dict[type, type] = {}
        followers.add(self)

    def __getstate__(self) -> tuple[Callable[[], None], bool]:
        """A copy of a step has an open guard of its own, since copying a guarded tensor finishes the update."""
        return self.finish, self.alone

    def __setstate__(self, state: tuple[Callable[[], None], bool]) -> None:
        Guard.__init__(self, *state)

    def before_fork(self) -> None:
        if self.alone and self.is_closed:
            self.finish()

    def in_child(self) -> None:
        self.lock = threading.RLock()  # a thread that holds it is not in the child

    def close(self, tensors: Iterable[torch.Tensor]) -> None:
        """Guard these tensors from now on."""
        with self.lock:
            for tensor in tensors:
                own = type(tensor)
                self.mark(tensor)
                self._guarded.append((tensor, own))

    def mark(self, tensor: torch.Tensor) -> None:
        """Guard a tensor for good, and do not keep it alive."""
        own = type(tensor)
        if own not in self._classes:
            self._classes[own] = _pending_class(own, self)
        tensor.__class__ = self._classes[own]

    def open(self) -> None:
        """Give all tensors their own class back."""
        with self.lock:
            for tensor, own in self._guarded:
                tensor.__class__ = own
            self._guarded.clear()

    def release(self, tensor: torch.Tensor) -> None:
        """Give one tensor its own class back."""
        with self.lock:
            for position, (guarded, own) in enumerate(self._guarded):
                if guarded is tensor:
                    tensor.__class__ = own
                    del self._guarded[position]
                    return

    @property
    def is_closed(self) -> bool:
        return bool(self._guarded)


def finish_others(tensors: Iterable[torch.Tensor], *own: Guard) -> None:
    """Finish the updates that other steps have left for these tensors. `own`: guards whose work may stay pending."""
    _finish(map(type, tensors), *own)


def _finish(types: Iterable[type], *but: Guard) -> None:
    for each in dict.fromkeys(types):
        guard = getattr(each, "commfuse_guard", None)
        if guard is not None and guard not in but:
            guard.finish()


class _Pending:
    """What the class of a guarded tensor adds to the tensor's own class."""

    __slots__ = ()
    commfuse_guard: Guard
    commfuse_own: type

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _HARMLESS:
            try:
                _finish(types)
            except BaseException as error:
                shorten(error)
                raise
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.detach and sys._getframe(1).f_code is _PARAMETER_OF:
            result.__class__ = cls.commfuse_own
        return result

    @user_frames_only
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.commfuse_guard.finish()
        return copy.deepcopy(self, memo)

    @user_frames_only
    def __reduce_ex__(self, protocol: Any) -> Any:
        self.commfuse_guard.finish()
        return self.__reduce_ex__(protocol)


def _pending_class(own: type, guard: Guard) -> type:
    """Instances of `own` count as instances of it, those of another guard as well: whoever compares two tensors asks
    whether one is an instance of the other's class."""

    def is_instance(cls: type, instance: Any) -> bool:
        return isinstance(instance, own)

    kind = type("Kind", (type(own),), {"__instancecheck__": is_instance})
    members = {
        "__module__": own.__module__,
        "__qualname__": own.__name__,
        "commfuse_guard": guard,
        "commfuse_own": own,
    }
    found: type = kind(own.__name__, (_Pending, own), members)
    return found
