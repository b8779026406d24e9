"""Values of attributes, kept in a form that a later look can be compared with."""

from __future__ import annotations

import weakref
from array import array
from collections import deque
from collections.abc import Container
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, MethodType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from commfuse_fx.capture.numpy_types import ARRAYS, SCALARS
from commfuse_fx.capture.tree import PLAIN

MOST_ITEMS = 1_000
"""Of larger containers and arrays only identity and length count: looking through them would slow every step down."""

_DEEPEST = 8

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()
"""The value of an attribute that is not there."""

CONSTANTS = (*PLAIN, range, *SCALARS, type(ABSENT))
CONTAINERS = (dict, list, tuple, deque)
BUFFERS = (bytearray, array)
_PARTS = ("func", "args", "keywords")
"""Of a functools.partial."""

_PRINTED = (float, complex, slice, *SCALARS)


@dataclass(frozen=True)
class Frozen:
    """A constant, a container with its items, or an object that only counts as itself."""

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
    """A value as it is now, to be compared later.

    own: ids of tensors that all count as the same, because a graph takes whichever is in their place.
    """
    kind = type(value)
    if isinstance(value, CONSTANTS):
        # Numbers are told apart as they print: 1.0 and -0.0 are other constants than 1 and 0.0, and NaN is itself.
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
    if kind is partial and depth < _DEEPEST:
        return Frozen(kind, None, tuple([freeze(getattr(value, part), own, depth + 1) for part in _PARTS]))
    if isinstance(value, torch.Tensor) and id(value) in own:
        return Frozen(torch.Tensor, None)
    if isinstance(value, weakref.ref):  # modules make new ones; what they refer to is looked at where it is read
        return Frozen(weakref.ref, None)
    size = len(value) if isinstance(value, (*CONTAINERS, set, frozenset)) else None
    return Frozen(kind, (Itself(value), size))


def freeze_values(tensor: torch.Tensor) -> Frozen:
    """A tensor whose values count."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        if tensor.numel() > MOST_ITEMS:
            return Frozen(torch.Tensor, tensor._version)
        return Frozen(float, str(tensor.tolist()))


class Itself:
    """Equal to another one of the same object. Does not keep the object alive where that can be avoided."""

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
    """Where two values differ first: path, and both values in words. constants_only: objects do not count."""
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
