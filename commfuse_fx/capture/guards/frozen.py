"""Freeze values of Python attributes, so that they can be compared with the values at a later time.

Why: docs/decisions.md, "What a trace has read is looked at, not what there is".
"""

from __future__ import annotations

import weakref
from array import array
from collections import deque
from collections.abc import Container
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MappingProxyType, MethodType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from commfuse_fx.capture.guards.numpy_types import ARRAYS, SCALARS
from commfuse_fx.capture.guards.tree import PLAIN

MOST_ITEMS = 1_000
"""The most items of a container or array that is compared item by item. Of larger ones, which would slow down every
step, only identity and length are compared."""

_DEEPEST = 8  # nested containers

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()
"""Stands for the value of an attribute that does not exist."""

CONSTANTS = (*PLAIN, range, *SCALARS, type(ABSENT))
CONTAINERS = (dict, list, tuple, deque)
BUFFERS = (bytearray, array)
_PARTS = ("func", "args", "keywords")
"""The attributes of a functools.partial."""

_PRINTED = (float, complex, slice, *SCALARS)


@dataclass(frozen=True)
class Frozen:
    """A frozen value: a constant, a container with frozen items, or an object that is compared by identity."""

    kind: type
    value: Any
    items: tuple[Frozen, ...] = ()

    @property
    def is_constant(self) -> bool:
        return issubclass(self.kind, CONSTANTS)

    def __str__(self) -> str:
        if issubclass(self.kind, CONSTANTS):
            text = self.value if issubclass(self.kind, _PRINTED) else repr(self.value)
            return str(text) if len(text) <= 60 else f"{text[:57]}..."
        if issubclass(self.kind, CONTAINERS) and all(item.is_constant for item in self.items) and len(self.items) <= 8:
            if issubclass(self.kind, dict):
                return f"{{{', '.join(f'{key!r}: {item}' for key, item in zip(self.value, self.items, strict=True))}}}"
            return f"{self.kind.__name__}({', '.join(map(str, self.items))})"
        return f"a {self.kind.__name__}" + (f" of {len(self.items)}" if self.items else "")


def freeze(value: Any, own: Container[int] = (), depth: int = 0) -> Frozen:
    """Freeze the present value, to be compared later.

    own: ids of the model's parameters and buffers. They count as equal, since a graph takes any tensor in their place.
    """
    kind = type(value)
    if isinstance(value, CONSTANTS):
        # Numbers are compared as text: 1.0 differs from 1, -0.0 differs from 0.0, and NaN equals NaN.
        exact = issubclass(kind, _PRINTED)
        return Frozen(kind, repr(value) if exact else value)
    if isinstance(value, CONTAINERS) and len(value) <= MOST_ITEMS and depth < _DEEPEST:
        if isinstance(value, dict):
            return Frozen(kind, tuple(value), tuple([freeze(each, own, depth + 1) for each in dict.values(value)]))
        return Frozen(kind, len(value), tuple([freeze(each, own, depth + 1) for each in value]))
    if isinstance(value, (set, frozenset)) and len(value) <= MOST_ITEMS:
        return Frozen(kind, frozenset(value))
    if isinstance(value, ARRAYS) and value.size <= MOST_ITEMS and value.dtype != object:
        return Frozen(kind, (value.shape, value.dtype.str, value.tobytes()))
    if isinstance(value, BUFFERS) and len(value) <= MOST_ITEMS:
        return Frozen(kind, bytes(value))
    if isinstance(value, MappingProxyType) and depth < _DEEPEST:
        return Frozen(kind, None, (freeze(value.copy(), own, depth + 1),))
    if isinstance(value, MethodType):  # a new one at each access
        return Frozen(kind, (Itself(value.__func__), Itself(value.__self__)))
    if kind is FunctionType and value.__closure__ and depth == 0 and not vars(value):  # a closure may be made anew
        around = (*map(content_of, value.__closure__), value.__defaults__, value.__kwdefaults__)
        return Frozen(kind, (Itself(value.__code__), *[freeze(each, own, _DEEPEST) for each in around]))
    if kind is partial and depth < _DEEPEST:
        return Frozen(kind, None, tuple([freeze(getattr(value, part), own, depth + 1) for part in _PARTS]))
    if isinstance(value, torch.Tensor) and id(value) in own:
        return Frozen(torch.Tensor, None)
    if isinstance(value, weakref.ref):  # modules make new ones; the object is noted when it is read
        return Frozen(weakref.ref, None)
    size = len(value) if isinstance(value, (*CONTAINERS, set, frozenset)) else None
    return Frozen(kind, (Itself(value), size))


def content_of(cell: CellType) -> Any:
    """What a variable of a closure is now; ABSENT before it is set."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def freeze_values(tensor: torch.Tensor) -> Frozen:
    """Freeze the values of a tensor. Of a large tensor, its version stands for them."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        if tensor.numel() > MOST_ITEMS:
            return Frozen(torch.Tensor, tensor._version)
        return Frozen(float, str(tensor.tolist()))


class Itself:
    """An object that is compared by identity. It is not kept alive, unless it does not support weak references."""

    __slots__ = ("_get", "_id")

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        try:
            self._get: Any = weakref.ref(value)
        except TypeError:
            self._get = lambda: value

    def __call__(self) -> Any:
        """The object, or None once it is gone."""
        return self._get()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self() is not None and self() is other()

    def __hash__(self) -> int:
        return self._id


def first_difference(old: Frozen, new: Frozen, path: str, constants_only: bool = False) -> tuple[str, str, str] | None:
    """The first difference of two frozen values: its path, and both values as text. None if they are equal.

    constants_only: whether differences of objects are ignored.
    """
    if old == new:
        return None
    if issubclass(old.kind, CONTAINERS) and old.kind is new.kind and old.value == new.value and old.items:
        keys = old.value if issubclass(old.kind, dict) else range(len(old.items))
        for key, one, two in zip(keys, old.items, new.items, strict=True):
            found = first_difference(one, two, f"{path}[{key!r}]", constants_only)
            if found is not None:
                return found
        return None
    if old.kind is new.kind is partial:
        for part, one, two in zip(_PARTS, old.items, new.items, strict=True):
            found = first_difference(one, two, f"{path}.{part}", constants_only)
            if found is not None:
                return found
        return None
    if constants_only and not (_is_plain(old) and _is_plain(new)):
        return None
    return path, str(old), str(new)


def _is_plain(value: Frozen) -> bool:
    if issubclass(value.kind, CONTAINERS):
        return not isinstance(value.value, tuple) or not any(isinstance(each, Itself) for each in value.value)
    return value.is_constant or issubclass(value.kind, (set, frozenset))
