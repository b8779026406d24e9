"""Attributes that a forward sets: a trace takes changes back, and every call makes them, since graphs run no Python.

Why: docs/decisions.md, "A trace takes back the attributes that a forward sets, and each call makes them".
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from commfuse_fx.capture.guards.frozen import (
    ABSENT,
    CONSTANTS,
    CONTAINERS,
    MOST_ITEMS,
    Frozen,
    Itself,
    content_of,
    freeze,
)
from commfuse_fx.capture.guards.numpy_types import SCALARS

_NUMBERS = (int, float, complex, *SCALARS)
_CODE = (FunctionType, BuiltinFunctionType, MethodType, partial)
_REPEATED = (*CONSTANTS, *_CODE, Enum, type)
_MOST_VALUES = 3
"""How often a forward may make another value of one that it has left before. What goes on so is a counter."""


@dataclass(frozen=True)
class ForwardWrite:
    """A write is one assignment or deletion of a forward, which can be done again.

    holder: the object that has the attribute, or the container that has the item. value: ABSENT for a deletion.
    label: its path in messages.
    """

    holder: Itself
    name: Any
    kind: str
    value: Any
    label: str

    def again(self) -> None:
        """Set the attribute or item, if its object still exists."""
        owner = self.holder()
        if owner is not None:
            _set(owner, self.name, self.kind, self.value)

    @property
    def is_of_code(self) -> bool:
        """Whether it would set a function, or put something in the place of one."""
        owner = self.holder()
        return owner is not None and _are_code(self.value, _value_of(owner, self.name, self.kind))


@dataclass
class Chains:
    """The values that the traces of one step have left, by label. It finds values that are made from those before."""

    _left: dict[str, list[Frozen]] = field(default_factory=dict)
    _made: dict[str, int] = field(default_factory=dict)

    def settles(self, label: str, before: Frozen, after: Frozen) -> bool:
        """Whether this change may be one of a few states that come back."""
        left = self._left.setdefault(label, [])
        if after not in left:
            self._made[label] = self._made.get(label, 0) + (before in left)
            left.append(after)
        return not self.are_endless(label)

    def are_endless(self, label: str) -> bool:
        """Whether values under this label were made from those before so often that graphs no longer set them."""
        return self._made.get(label, 0) > _MOST_VALUES


class WholeCall:
    """A call of what is compiled, as a `with` block, at whose end its forward's writes are done again.

    writes: those of the graph that serves the call. One call runs at a time. chains: those of all calls.
    """

    def __init__(self) -> None:
        self.chains = Chains()
        self.writes: tuple[ForwardWrite, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is of another model."""
        return WholeCall, ()

    def __enter__(self) -> None:
        self.writes = ()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Inside the block the call is traced. After one that is refused, the model is as before, but for patches of
        its code that take themselves back: in eager PyTorch they are gone after an error, too."""
        try:
            yield
        except BaseException:
            self.writes = tuple(write for write in self.writes if write.is_of_code)
            raise

    def __exit__(self, *error: object) -> None:
        for write in self.writes:
            if not self.chains.are_endless(write.label):
                write.again()


class ForwardWrites:
    """Notes what one trace writes to attributes, and to items of lists and dicts that attributes hold.

    own: as for `freeze`. chains: those of all traces of the step.
    """

    def __init__(self, own: Container[int], chains: Chains) -> None:
        self._own = own
        self._chains = chains
        self._known: dict[int, Any] = {}
        self._before: dict[tuple[int, Any], tuple[Any, Any, str, str, Any]] = {}
        self._read: dict[tuple[int, Any], tuple[Any, str, str, Any]] = {}
        self._items: dict[int, tuple[Any, str, dict[Any, Any]]] = {}
        self._left: list[tuple[Any, Any, str, str, Any]] = []

    def know(self, value: Any, label: str) -> bool:
        """An object is one that the model had before the trace, as far as one can tell. False if that is not news."""
        if id(value) in self._known:
            return False
        self._known[id(value)] = value
        if isinstance(value, (dict, list)) and len(value) <= MOST_ITEMS:
            self._items[id(value)] = value, label, dict(_items(value))
        return True

    def read(self, owner: Any, name: str, label: str, value: Any, kind: str) -> None:
        """An attribute was read for the first time. value: what the instance holds."""
        self._read[id(owner), name] = owner, label, kind, value

    def about_to_write(self, owner: Any, name: str, label: str) -> None:
        """An attribute of an object is about to be set or deleted."""
        if (id(owner), name) in self._before or id(owner) not in self._known:
            return
        kind = "slot" if _is_slot(owner, name) else "attribute"
        if kind == "slot" or instance_dict(owner) is not None:
            self._before[id(owner), name] = owner, name, kind, label, _value_of(owner, name, kind)

    def taken_back(self, was_read: Callable[[Any, str], bool]) -> tuple[ForwardWrite, ...]:
        """Give attributes the values that they had before the trace, and return the writes that left others.

        A number that is made of what was there, what grows and an object that the forward has made stay as the trace
        has left them, and a tensor of the trace until `without_tensors`.
        """
        found: list[ForwardWrite] = []
        for owner, name, kind, label, before, guarded in list(self._places(was_read)):
            after = _value_of(owner, name, kind)
            if _is_traced(after) and not _holds_traced(before):
                self._left.append((owner, name, kind, label, before))
            if (guarded and after is before) or not self._can_be_repeated(after) or _holds_traced(before):
                continue
            if guarded:
                old, new = freeze(before, self._own), freeze(after, self._own)
                if old == new or _counts(old, new) or not self._chains.settles(label, old, new):
                    continue
            found.append(ForwardWrite(Itself(owner), name, kind, after, label))
            _set(owner, name, kind, before)
        self._forget()
        return tuple(found)

    def without_tensors(self) -> Iterator[str]:
        """Give attributes of plain objects that hold tensors of the trace what they held before it; yields their
        labels. Modules have been given theirs by then."""
        for owner, name, kind, label, before in self._left:
            if _is_traced(_value_of(owner, name, kind)):
                _set(owner, name, kind, before)
                yield label
        self._left.clear()

    def undo(self) -> None:
        """After a trace that has failed, give attributes the values that they had before it. What is said of `tracing`
        holds for code."""
        for owner, name, kind, _, before, _ in list(self._places(lambda owner, name: False)):
            after = _value_of(owner, name, kind)
            if after is not before and not (_are_code(before, after) or _holds_traced(before)):
                _set(owner, name, kind, before)
        self._forget()

    def _forget(self) -> None:
        for kept in (self._known, self._before, self._read, self._items):
            kept.clear()

    def _places(self, was_read: Callable[[Any, str], bool]) -> Iterator[tuple[Any, Any, str, str, Any, bool]]:
        for owner, name, kind, label, before in self._before.values():
            yield owner, name, kind, label, before, was_read(owner, name)
        for (number, name), (owner, label, kind, before) in self._read.items():
            if (number, name) not in self._before and number in self._known:
                yield owner, name, kind, label, before, True
        for held, label, before_items in self._items.values():
            if isinstance(held, list) and len(held) != len(before_items):
                continue
            now = dict(_items(held))
            for key in {**before_items, **now}:
                if now.get(key, ABSENT) is not (before := before_items.get(key, ABSENT)):
                    yield held, key, "item", f"{label}[{key!r}]", before, True

    def _can_be_repeated(self, value: Any, depth: int = 0) -> bool:
        """Whether another call may be given this value: it is a constant, code, or an object of before the trace."""
        if value is ABSENT or id(value) in self._known:
            return not _holds_traced(value)
        if isinstance(value, (*CONTAINERS, set, frozenset)) and len(value) <= MOST_ITEMS and depth < 3:
            items = value.values() if isinstance(value, dict) else value
            return all(self._can_be_repeated(item, depth + 1) for item in items)
        return isinstance(value, _REPEATED) and not _holds_traced(value)


def _is_traced(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, list, tuple, Mapping)) and _holds_traced(value)


def _are_code(*values: Any) -> bool:
    return any(isinstance(value, _CODE) for value in values)


def instance_dict(owner: Any) -> dict[str, Any] | None:
    """The attributes of an object; None for one that has slots only."""
    try:
        held: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    return held


def _is_slot(owner: Any, name: str) -> bool:
    return any(isinstance(vars(cls).get(name), MemberDescriptorType) for cls in type(owner).__mro__)


def _value_of(owner: Any, name: Any, kind: str) -> Any:
    if kind == "slot":
        return getattr(owner, name, ABSENT)
    held = owner if kind == "item" else object.__getattribute__(owner, "__dict__")
    if isinstance(held, list):
        return held[name] if name < len(held) else ABSENT
    return held.get(name, ABSENT)


def _set(owner: Any, name: Any, kind: str, value: Any) -> None:
    """Past `__setattr__`: what else that does was noted as writes of its own."""
    if kind == "slot":
        object.__delattr__(owner, name) if value is ABSENT else object.__setattr__(owner, name, value)
        return
    held = owner if kind == "item" else object.__getattribute__(owner, "__dict__")
    if value is ABSENT:
        held.pop(name, None)
    elif not isinstance(held, list) or name < len(held):
        held[name] = value


def _items(value: dict[Any, Any] | list[Any]) -> Iterator[tuple[Any, Any]]:
    return iter(dict.items(value)) if isinstance(value, dict) else enumerate(value)


def _counts(old: Frozen, new: Frozen) -> bool:
    """Whether a number became another one, or a container another number of items."""
    if old == new:
        return False
    if issubclass(old.kind, (set, frozenset)) and issubclass(new.kind, (set, frozenset)):
        return True
    if issubclass(old.kind, CONTAINERS) and issubclass(new.kind, CONTAINERS):
        return old.value != new.value or any(map(_counts, old.items, new.items))
    return all(issubclass(each.kind, _NUMBERS) and each.kind is not bool for each in (old, new))


def _holds_traced(value: Any, deeper: int = 3) -> bool:
    if isinstance(value, FakeTensor):
        return True
    if deeper == 0 or isinstance(value, (*CONSTANTS, type)):
        return False
    if isinstance(value, FunctionType):
        # A function may be in a cell of its own.
        return any(_holds_traced(content_of(cell), min(deeper, 2) - 1) for cell in value.__closure__ or ())
    if isinstance(value, (MethodType, nn.Module)):  # a module has stand-ins for its tensors while it is traced
        return False
    if isinstance(value, partial):
        return _holds_traced((*value.args, *value.keywords.values()), deeper)
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        items = value.values() if isinstance(value, Mapping) else value
        return any(_holds_traced(item, deeper - 1) for item in items)
    return any(_holds_traced(item, deeper - 1) for item in getattr(value, "__dict__", {}).values())
