"""Whether a graph still serves: the Python values that its trace has read are what they were."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from commfuse_fx.capture.frozen import BUFFERS, CONSTANTS, CONTAINERS, MOST_ITEMS, Frozen, first_difference, freeze
from commfuse_fx.capture.numpy_types import ARRAYS
from commfuse_fx.capture.reads import Read

_WHAT = {"class": "class attribute ", "cell": "variable ", "content": "", "values": "values of "}

OwnValues = dict[str, list[Frozen]]
"""By the label of a read: the values that forwards themselves have found and left there, in any trace of a step."""


@dataclass
class _Flat:
    """The same in a form that is looked through before every step without a line of Python for each value."""

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

    def take_equal_constants(self) -> bool:
        """Whether all that differs is constants that have been set to equal ones; those are the values from now on."""
        try:
            if list(map(type, self.instances)) != self.classes or list(map(len, self.sized)) != self.sizes:
                return False
            now = list(map(operator.getitem, self.holders, self.keys))
        except LookupError:
            return False
        for number, (new, old) in enumerate(zip(now, self.values, strict=True)):
            if new is not old:
                if not isinstance(new, CONSTANTS) or freeze(new) != freeze(old):
                    return False
                self.values[number] = new
        return self.holds()


class Guards:
    """What one graph depends on besides its signature.

    own_values: shared by all graphs of a step. A value that the forward itself changes does not run on while the graph
    runs; what forwards have found and left there is accepted, so that several graphs can take turns.
    own_tensors: gives the ids of the model's parameters and buffers now.
    """

    def __init__(self, reads: Sequence[Read], own_values: OwnValues, own_tensors: Callable[[], Container[int]]) -> None:
        self._reads = list(reads)
        self._own_values = own_values
        self._own_tensors = own_tensors
        self._flat: _Flat | None = None
        self.changes = dict(filter(None, map(self._own_change, reads)))
        """What the forward itself has changed while it was traced, by label: both values in words."""

    def hold(self) -> bool:
        """Looks at everything; cheap where nothing has changed."""
        if self._flat is not None and (self._flat.holds() or self._flat.take_equal_constants()):
            return True
        if self.difference():
            return False
        self._flat = self._flattened()
        return True

    def difference(self) -> str:
        """What has changed since the trace, in words; empty where nothing has."""
        own = self._own_tensors()
        for read in self._reads:
            owner = read.owner  # held, or garbage collection could take it before its value is read
            if owner is None:
                continue  # whatever led to it has changed as well, or it only served the trace
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
        """Let go of the objects that were looked at; they are found again when the graph is wanted again."""
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
