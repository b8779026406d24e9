"""Guards check whether a graph is still valid: the Python values that its trace has read must not have changed.

Why: docs/decisions.md, "What a trace has read is looked at, not what there is".
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

import torch

from commfuse_fx.capture.guards.frozen import (
    BUFFERS,
    CONSTANTS,
    CONTAINERS,
    MOST_ITEMS,
    Frozen,
    first_difference,
    freeze,
)
from commfuse_fx.capture.guards.numpy_types import ARRAYS
from commfuse_fx.capture.guards.reads import Read

_WHAT = {"class": "class attribute ", "cell": "variable ", "content": "", "values": "values of "}

OwnValues = dict[str, list[Frozen]]
"""By the label of a read: the values that the forwards of a step found and left there, in any of its traces."""


@dataclass
class _Flat:
    """The values in flat lists, which can be checked before every step without a line of Python per value."""

    instances: list[Any] = field(default_factory=list)
    classes: list[type] = field(default_factory=list)
    sized: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    holders: list[Any] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    owners: list[Any] = field(default_factory=list)
    slots: list[str] = field(default_factory=list)
    slot_values: list[Any] = field(default_factory=list)
    probes: list[tuple[Callable[[], Any], Any]] = field(default_factory=list)

    def holds(self) -> bool:
        try:
            return (
                all(map(operator.is_, map(type, self.instances), self.classes))
                and list(map(len, self.sized)) == self.sizes
                and all(map(operator.is_, map(operator.getitem, self.holders, self.keys), self.values))
                and all(map(operator.is_, map(getattr, self.owners, self.slots), self.slot_values))
                and all(probe() == value for probe, value in self.probes)
            )
        except (LookupError, AttributeError):
            return False

    def take_equal_values(self) -> bool:
        """Whether values differ only as objects: equal constants, or closures and methods that were made anew. If so,
        the new objects are kept."""
        try:
            if list(map(type, self.instances)) != self.classes or list(map(len, self.sized)) != self.sizes:
                return False
            now = list(map(operator.getitem, self.holders, self.keys))
        except LookupError:
            return False
        for number, (new, old) in enumerate(zip(now, self.values, strict=True)):
            if new is not old:
                if not isinstance(new, (*CONSTANTS, FunctionType, MethodType)) or freeze(new) != freeze(old):
                    return False
                self.values[number] = new
        return self.holds()


class Guards:
    """The Python values that one graph depends on, besides its signature.

    own_values: values that the forward itself changes, shared by all graphs of a step. A compiled step does not change
        them. All values that a forward found or left there are accepted, so that several graphs can take turns.
    own_tensors: a function that gives the present ids of the model's parameters and buffers.
    """

    def __init__(self, reads: Sequence[Read], own_values: OwnValues, own_tensors: Callable[[], Container[int]]) -> None:
        self._reads = list(reads)
        self._own_values = own_values
        self._own_tensors = own_tensors
        self._flat: _Flat | None = None
        self.changes = dict(filter(None, map(self._own_change, reads)))
        """The values that the forward changed while it was traced, by label: both values as text."""

    def hold(self) -> bool:
        """Whether all values are unchanged. The check is cheap if nothing has changed."""
        if self._flat is not None and (self._flat.holds() or self._flat.take_equal_values()):
            return True
        if self.difference():
            return False
        self._flat = self._flattened()
        return True

    def difference(self) -> str:
        """The first change since the trace, as text; empty if there is none."""
        own = self._own_tensors()
        for read in self._reads:
            owner = read.owner  # held, or garbage collection could take it before its value is read
            if owner is None:
                continue  # the reference to it has changed too, or it existed only during the trace
            if type(owner) is not read.of_class and not isinstance(owner, torch.Tensor):
                label = read.label.removesuffix(f".{read.name}")
                return f"class of {label}: {read.of_class.__qualname__} -> {type(owner).__qualname__}"
            now = read.now(own)
            if now == read.last or now in self._own_values.get(read.label, ()):
                continue
            if read.kind == "names":
                return f"attribute {read.label}.{read.value()[0]} was added"
            found = first_difference(read.last, now, read.label)
            if found is not None:
                what = _WHAT.get(read.kind, "attribute ")
                return f"{what}{found[0]}: {found[1]} -> {found[2]}"
        return ""

    def release(self) -> None:
        """Drop the references to the objects; `hold` collects them again."""
        self._flat = None

    def _now(self, read: Read) -> Frozen:
        return read.now(self._own_tensors())

    def _own_change(self, read: Read) -> tuple[str, tuple[str, str]] | None:
        if read.kind in ("names", "class", "values") or read.first == read.last:
            return None
        found = first_difference(read.first, read.last, read.label, constants_only=True)
        if found is None:
            return None
        accepted = self._own_values.setdefault(read.label, [])
        accepted.extend(value for value in (read.first, read.last) if value not in accepted)
        is_kept_result = found[1] == "absent" and not hasattr(type(read.owner), read.name)
        return None if is_kept_result else (found[0], found[1:])

    def _flattened(self) -> _Flat:
        flat = _Flat()
        seen: set[int] = set()
        for read in self._reads:
            owner = read.owner
            if owner is None:
                continue
            value = read.value()
            if read.kind == "values":
                flat.probes.append((partial(_version, owner), _version(owner)))
                continue
            if read.kind == "slot":
                flat.owners.append(owner)
                flat.slots.append(read.name)
                flat.slot_values.append(value)
            elif read.kind == "cell":
                flat.probes.append((partial(self._now, read), self._now(read)))
            elif read.kind in ("attribute", "class", "names"):
                held = vars(owner)
                if read.kind != "class" and id(owner) not in seen:
                    seen.add(id(owner))
                    if not isinstance(owner, torch.Tensor):  # the class of a pending parameter is a guarded one
                        flat.instances.append(owner)
                        flat.classes.append(type(owner))
                    flat.sized.append(held)
                    flat.sizes.append(len(held))
                if read.kind != "names" and read.name in held:
                    _hold(flat, held, read.name, value)
            _look_inside(flat, value, seen, read.kind == "names")
        return flat


def _version(tensor: torch.Tensor) -> int:
    return tensor._version


def _hold(flat: _Flat, held: Any, key: Any, value: Any) -> None:
    flat.holders.append(held)
    flat.keys.append(key)
    flat.values.append(value)


def _look_inside(flat: _Flat, value: Any, seen: set[int], skipped: bool) -> None:
    if skipped or isinstance(value, CONSTANTS) or id(value) in seen:
        return
    if isinstance(value, CONTAINERS):
        seen.add(id(value))
        if not isinstance(value, tuple):
            flat.sized.append(value)
            flat.sizes.append(len(value))
        if len(value) > MOST_ITEMS:
            return
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            if not isinstance(value, tuple):
                _hold(flat, value, key, item)
            _look_inside(flat, item, seen, False)
    elif isinstance(value, (set, MappingProxyType, *BUFFERS, *ARRAYS)):
        seen.add(id(value))
        flat.probes.append((lambda: freeze(value), freeze(value)))
