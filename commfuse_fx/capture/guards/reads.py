"""Record the Python values that a trace reads: attributes of modules, of the loss and of objects reached from them.

While the model is traced, the classes of these objects get a `__getattribute__` and a `__setattr__` that take notes.
An attribute that the forward writes before it reads it does not count, since nothing depends on its old value.

Why: docs/decisions.md, "What a trace has read is looked at, not what there is".
"""

from __future__ import annotations

import enum
import functools
import random
import sys
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from commfuse_fx.capture.guards.forward_writes import ForwardWrites, WholeCall, instance_dict
from commfuse_fx.capture.guards.frozen import (
    ABSENT,
    CONSTANTS,
    CONTAINERS,
    MOST_ITEMS,
    Frozen,
    Itself,
    content_of,
    freeze,
    freeze_values,
)
from commfuse_fx.capture.guards.model_structure import HOOKS
from commfuse_fx.capture.guards.noted_classes import FOREIGN, can_be_noted, noted, taking_notes
from commfuse_fx.capture.guards.numpy_types import GENERATORS
from commfuse_fx.capture.torch_parts.substitute import is_traced, warn_of_stored_tensor
from commfuse_fx.support.user_lines import is_library

_OF_MODULES = frozenset(["_parameters", "_buffers", "_modules"])
_STRUCTURE = frozenset(
    [
        "training",
        *HOOKS,
        *(f"{name}_with_kwargs" for name in HOOKS),
        "_forward_hooks_always_called",
        "_is_full_backward_hook",
        "_non_persistent_buffers_set",
    ]
)
"""Attributes of the model's own modules that `Watch` compares already."""


class Read:
    """A read is one value that a trace has read.

    kind: "attribute" of an instance, "class" attribute, "slot", "cell" of a closure, "content" of a container, "values"
        of a tensor, or "names" that were looked up in an instance and are no attributes of it.
    name: the name of the attribute.
    label: the path of the value in messages.
    first: the frozen value that was read.
    last: the frozen value at the end of the trace.
    """

    __slots__ = ("_owner", "first", "kind", "label", "last", "name", "of_class")

    def __init__(self, kind: str, owner: Any, name: str, label: str, first: Frozen) -> None:
        self.kind, self.name, self.label, self.first, self.last = kind, name, label, first, first
        self._owner = Itself(owner)
        self.of_class = type(owner)

    @property
    def owner(self) -> Any:
        """The object that holds the value; None after it was garbage-collected."""
        return self._owner()

    def value(self) -> Any:
        """The present value. For "names", those that exist now."""
        owner = self.owner
        if self.kind in ("attribute", "class"):
            return vars(owner).get(self.name, ABSENT)
        if self.kind == "slot":
            return getattr(owner, self.name, ABSENT)
        if self.kind == "names":
            held = vars(owner)
            return tuple(name for name in self.first.value if name in held)
        return content_of(owner) if self.kind == "cell" else owner

    def now(self, own: Container[int]) -> Frozen:
        """The present value, frozen. own: as for `freeze`."""
        return freeze_values(self.owner) if self.kind == "values" else freeze(self.value(), own)


class Reads:
    """Notes the values that one trace reads.

    whole_call: the call that is traced, which is told what the forward has written.
    on_generator, on_python_generator: called with each random generator that is found, and its label. The first is for
        generators of torch, the second for those of Python and numpy.
    """

    def __init__(self, model: nn.Module, loss_fn: Any = None, whole_call: WholeCall | None = None) -> None:
        self._model, self._loss_fn = model, loss_fn
        self._labels = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
        self._inside = frozenset(self._labels)
        self._labels.update({id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())})
        self.own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._notes: dict[tuple[int, str], Read | None] = {}  # None: written first
        self._not_there: dict[int, tuple[Any, dict[str, None]]] = {}
        self._alive: dict[int, Any] = {}  # so that no other object gets the id of one of these
        self._made: dict[int, nn.Module] = {}  # modules that the forward makes, as a slice of a ModuleList does
        self._whole_call = whole_call or WholeCall()
        self._writes = ForwardWrites(self.own, self._whole_call.chains)
        self.python_numbers: Mapping[str, None] = {}
        """The places where the trace has drawn random numbers of Python or numpy."""
        self.on_generator: Callable[[torch.Generator, str], None] = lambda generator, label: None
        self.on_python_generator: Callable[[Any, str], None] = lambda generator, label: None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside the `with` block, note the values that this thread reads."""
        with taking_notes(self, nn.Module):
            self.see(self._loss_fn, "loss_fn")
            for name, module in self._model.named_modules():
                self._writes.know(module, name)
                for kind in HOOKS:
                    for hook in vars(module).get(kind, {}).values():
                        self.see(hook, f"a hook of {name or type(module).__name__}")
            for name, param in self._model.named_parameters():
                for hook in (param._backward_hooks or {}).values():
                    self.see(hook, f"a hook of {name}")
            try:
                yield
            except BaseException:
                self._writes.undo()
                raise
        self._take_back()

    def _take_back(self) -> None:
        """At the end of a trace, set what it has set to what was there before."""
        for owner, names in self._not_there.values():
            for name in names:
                if name in (instance_dict(owner) or {}):
                    self._wrote(owner, name)  # past __setattr__, as functools.cached_property does
        notes = self._notes
        self._whole_call.writes = self._writes.taken_back(lambda owner, name: notes.get((id(owner), name)) is not None)

    def finish(self) -> list[Read]:
        """All reads, with the values at the end of the trace. Objects that existed only while tracing are left out."""
        for label in self._writes.without_tensors():
            warn_of_stored_tensor(label)
        owner: Any
        for owner in self._made.values():
            self._note_parts(owner)
        found = [read for read in self._notes.values() if read is not None]
        for owner, names in self._not_there.values():
            absent = tuple(name for name in names if (id(owner), name) not in self._notes)
            if absent and instance_dict(owner) is not None:
                found.append(Read("names", owner, "", self._label(owner), Frozen(tuple, absent)))
        self._notes.clear()
        self._not_there.clear()
        self._alive.clear()
        self._made.clear()
        owner = None  # else this variable would keep the last owner alive
        # Garbage may be collected at any time, so the list holds each owner until its value is taken.
        there = [(read, owner) for read in found if (owner := read.owner) is not None]
        for read, _ in there:
            read.last = read.now(self.own)
        return [read for read, _ in there]

    def got(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name` was read."""
        if name == "__dict__" and not is_library(sys._getframe(2).f_code.co_filename):
            is_first = self._writes.know(value, f"{self._label(owner)}.__dict__")
            for each, held in list(value.items()) if is_first else ():
                self.got(owner, each, held)
        if name.startswith("__") or (id(owner), name) in self._notes:
            return
        inside = id(owner) in self._inside
        if (name in _OF_MODULES and isinstance(owner, nn.Module)) or (inside and name in _STRUCTURE):
            return
        held = instance_dict(owner)
        if held is not None and name in held:
            self._note("attribute", owner, name, value)
            self.see(value, f"{self._label(owner)}.{name}")
            return
        self.missed(owner, name)
        for cls in type(owner).__mro__:
            if name not in vars(cls):
                if cls is not object:
                    self._not_there.setdefault(id(cls), (cls, {}))[1][name] = None
                continue
            found = vars(cls)[name]
            if isinstance(found, MemberDescriptorType):
                self._note("slot", owner, name, value)
                self.see(value, f"{self._label(owner)}.{name}")
            elif (id(cls), name) not in self._notes:
                label = f"{cls.__name__}.{name}"
                self._notes[id(cls), name] = Read("class", cls, name, label, freeze(found, self.own))
                if isinstance(found, FunctionType):
                    self._see_globals(found)
                elif not hasattr(type(found), "__get__"):  # not a property
                    self.see(found, label)
            return

    def got_of_tensor(self, tensor: torch.Tensor, name: str) -> None:
        """An attribute was read that the user may have stored on a parameter or buffer."""
        if (id(tensor), name) in self._notes:
            return
        if name in vars(tensor):
            self._note("attribute", tensor, name, vars(tensor)[name])
            self.see(vars(tensor)[name], f"{self._label(tensor)}.{name}")
        else:
            self.missed(tensor, name)

    def stored_in_tensor(self, tensor: torch.Tensor, name: str, value: Any) -> None:
        """The trace has stored an attribute in the stand-in of a parameter or buffer."""
        if is_traced(value):
            warn_of_stored_tensor(f"{self._label(tensor)}.{name}")
            return
        self._writes.know(tensor, self._label(tensor))
        self.wrote(tensor, name)
        vars(tensor)[name] = value

    def missed(self, owner: Any, name: str) -> None:
        """`owner.name` was looked for, and is not an attribute of the instance."""
        if name.startswith("__"):
            return
        self._alive[id(owner)] = owner
        self._not_there.setdefault(id(owner), (owner, {}))[1][name] = None
        if isinstance(owner, nn.Module) and id(owner) not in self._inside:
            parts = [vars(owner).get(held) for held in sorted(_OF_MODULES)]
            # nn.Module.__init__ reads an attribute before it sets any; modules that tracing itself makes are empty.
            if None in parts or not (any(parts) or id(owner) in self._labels):
                self._made[id(owner)] = owner
            if id(owner) not in self._made:
                self._note_parts(owner)

    def _note_parts(self, owner: nn.Module) -> None:
        for held in sorted(_OF_MODULES):
            if (id(owner), held) not in self._notes and held in vars(owner):
                self._note("attribute", owner, held, vars(owner)[held])

    def wrote(self, owner: Any, name: str) -> None:
        """`owner.name` is about to be set."""
        if name not in _OF_MODULES and not (owner is self._model and name == "training"):  # `own_mode_kept` looks at it
            self._writes.about_to_write(owner, name, f"{self._label(owner)}.{name}")
        self._wrote(owner, name)

    def deleted(self, owner: Any, name: str) -> None:
        """`owner.name` is about to be deleted."""
        held = instance_dict(owner) or {}
        if name in held:
            self.got(owner, name, held[name])
        self.wrote(owner, name)

    def _wrote(self, owner: Any, name: str) -> None:
        if (id(owner), name) in self._notes:
            return
        self._alive[id(owner)] = owner
        was_read = name in self._not_there.get(id(owner), (owner, {}))[1]
        if was_read:
            self._note("attribute", owner, name, ABSENT)
        else:
            self._notes[id(owner), name] = None

    def values(self, tensor: torch.Tensor) -> None:
        """The values of a tensor that is not traced were read in Python."""
        named = (read.label for read in self._notes.values() if read is not None and read.value() is tensor)
        read = Read("values", tensor, "", next(named, "a tensor"), freeze_values(tensor))
        self._notes.setdefault((id(tensor), "values"), read)
        self._alive[id(tensor)] = tensor

    def see(self, value: Any, label: str) -> None:
        """An object was found: note reads of its attributes from now on, or the items that it holds."""
        if isinstance(value, (*CONSTANTS, enum.Enum, torch.Tensor, type, ModuleType)) or id(value) in self._alive:
            return
        self._alive[id(value)] = value
        self._writes.know(value, label)
        if isinstance(value, nn.Module):
            self._name_modules(value, label)
        elif isinstance(value, (*CONTAINERS, set, frozenset)):
            if len(value) <= MOST_ITEMS:
                for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
                    self.see(item, f"{label}[{key!r}]")
            if can_be_noted(type(value)):
                self._see_object(value, label)
        elif isinstance(value, torch.Generator):
            self.on_generator(value, label)
        elif isinstance(value, (random.Random, *GENERATORS)):
            self.on_python_generator(value, label)
        elif isinstance(value, FunctionType):
            self._see_function(value, label)
        elif isinstance(value, MethodType):
            self.see(value.__self__, f"{label}.__self__")
            self.see(value.__func__, label)
        elif isinstance(value, functools.partial):
            self._content(value.keywords, f"{label}.keywords")
            self._content(value.args, f"{label}.args")
            self.see(value.func, label)
        elif isinstance(value, SimpleNamespace):
            self._labels[id(value)] = label
            self._content(vars(value), label)
        elif isinstance(value, weakref.ref):
            self.see(value(), f"{label}()")
        elif isinstance(value, MappingProxyType):
            for key, item in value.items():
                self.see(item, f"{label}[{key!r}]")
        elif can_be_noted(type(value)):
            self._see_object(value, label)

    def _see_object(self, value: Any, label: str) -> None:
        self._labels.setdefault(id(value), label)
        noted(type(value))
        for cls in type(value).__mro__:
            if isinstance(vars(cls).get("__call__"), FunctionType):
                self._see_function(vars(cls)["__call__"], label)
                break

    def _name_modules(self, module: nn.Module, label: str) -> None:
        if id(module) not in self._labels:
            self._labels[id(module)] = label
            for name, part in vars(module)["_modules"].items():
                if part is not None:
                    self._name_modules(part, f"{label}.{name}")

    def _see_function(self, function: FunctionType, label: str) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if (id(cell), "") in self._notes:
                continue
            read = Read("cell", cell, "", f"{label}: {name}", Frozen(type(None), None))
            read.first = freeze(read.value(), self.own)
            self._notes[id(cell), ""] = read
            self.see(read.value(), f"{label}: {name}")
        if str(function.__module__).partition(".")[0] not in FOREIGN and (id(function), "__code__") not in self._notes:
            for name in ("__code__", "__defaults__", "__kwdefaults__", "__dict__"):
                read = Read("slot", function, name, f"{label}.{name}", freeze(getattr(function, name), self.own))
                self._notes[id(function), name] = read
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.see(default, label)
        for name, value in vars(function).items():
            self.see(value, f"{label}.{name}")
        self._see_globals(function)

    def _see_globals(self, function: FunctionType) -> None:
        """See the torch generators among a function's globals. Other globals are too many to be noted."""
        for name in function.__code__.co_names:
            if isinstance(function.__globals__.get(name), torch.Generator):
                self.see(function.__globals__[name], name)

    def _content(self, held: Any, label: str) -> None:
        self._notes.setdefault((id(held), ""), Read("content", held, "", label, freeze(held, self.own)))
        self.see(held, label)

    def _note(self, kind: str, owner: Any, name: str, value: Any) -> None:
        self._alive[id(owner)] = owner
        label = f"{self._label(owner)}.{name}"
        self._notes[id(owner), name] = Read(kind, owner, name, label, freeze(value, self.own))
        if not isinstance(owner, (torch.Tensor, type)):
            held = value if kind == "slot" else (instance_dict(owner) or {}).get(name, ABSENT)
            self._writes.read(owner, name, label, held if value is not ABSENT else ABSENT, kind)

    def _label(self, owner: Any) -> str:
        return self._labels.get(id(owner)) or (owner if isinstance(owner, type) else type(owner)).__name__
