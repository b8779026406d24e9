"""Turn marks of modules, functions and tensors into nodes of the graph while a step is traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.sharding.marking.check_shape import check_shape
from commfuse_fx.sharding.marking.layout_op import NodeMark, mark_tensor
from commfuse_fx.sharding.marking.logical import kind_of_function, kind_of_module
from commfuse_fx.sharding.marking.marks import ModuleMark, marks_of
from commfuse_fx.sharding.marking.part_ops import PartCall
from commfuse_fx.sharding.marking.strategy import TensorStrategy
from commfuse_fx.sharding.marking.traced_parts import BatchParts, EnteredCall, PartHooks
from commfuse_fx.support.checks import show


@dataclass(frozen=True)
class _Tracing:
    """A step that is traced with its marks. numbers: of marked calls. batch: what `cross_batch` divides."""

    numbers: Iterator[int]
    batch: BatchParts


_tracing: ContextVar[_Tracing | None] = ContextVar("commfuse_traced_marks", default=None)
"""The step that is being traced with its marks; None otherwise."""


def tracing_marks() -> bool:
    """Whether a step is being traced in which marks become nodes."""
    return _tracing.get() is not None


def entered_call() -> PartCall | None:
    """The call around this one that computes with a rank's own part of the batch."""
    tracing = _tracing.get()
    return None if tracing is None else tracing.batch.inside


@contextmanager
def marks_traced(model: nn.Module, batch: BatchParts | None = None) -> Iterator[None]:
    """Inside the `with` block, marks of modules, functions and tensors become nodes of the traced graph."""
    token = _tracing.set(_Tracing(count(), batch or BatchParts()))
    try:
        with module_marks_traced(model):
            yield
    finally:
        _tracing.reset(token)


@contextmanager
def module_marks_traced(model: object, name: str = "") -> Iterator[None]:
    """Inside the `with` block, marks of these modules become nodes too. model: a module, or no module; then nothing
    happens. name: what its path begins with."""
    tracing = _tracing.get()
    handles: list[Any] = []
    try:
        if tracing is not None and isinstance(model, nn.Module):
            for path, module in model.named_modules(prefix=name):
                handles.extend(_hooks(path, module, tracing))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hooks(path: str, module: nn.Module, tracing: _Tracing) -> Iterator[Any]:
    """Register the hooks of one module. Layouts are those of the whole batch, outside of what its parts compute."""
    marks = marks_of(module)
    places = [mark.place for mark in marks if mark.cross_batch]
    parts = PartHooks(path, places[0], tracing.batch, tracing.numbers) if places else None
    if parts is not None:
        yield module.register_forward_hook(parts.after)
    for index, mark in enumerate(marks):
        if mark.on_activations:
            hooks = _ModuleHooks(module, path, index, mark, tracing.numbers)
            yield module.register_forward_pre_hook(hooks.before, with_kwargs=True)
            yield module.register_forward_hook(hooks.after)
    if parts is not None:
        yield module.register_forward_pre_hook(parts.before, with_kwargs=True)


@dataclass(frozen=True)
class MarkedFunction:
    """A function with strategies for the tensors of its calls. Outside of a compiled step it is the plain function.

    inputs: one strategy per tensor argument, in the order of the arguments. Tensors in lists count too.
    outputs: one strategy per tensor of the result; the last ones may be left out.
    place: the source line of the mark.
    cross_batch: whether a rank computes it with its own part of the batch.
    """

    function: Callable[..., Any]
    inputs: tuple[TensorStrategy | None, ...]
    outputs: tuple[TensorStrategy | None, ...]
    place: str
    cross_batch: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. While it is traced, raises ConfigValueError if tensors and strategies differ in number."""
        tracing = _tracing.get()
        if tracing is None:
            return self.function(*args, **kwargs)
        flat, structure = pytree.tree_flatten((args, kwargs))
        tensors = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]
        name = name_of(self.function)
        if self.inputs and len(self.inputs) != len(tensors):
            raise ConfigValueError(
                f"{self.place}: in_strategy of {name} has {len(self.inputs)} entries, but it is called with "
                f"{len(tensors)} tensors; give one per tensor, None for one to be left unmarked"
            )
        kind = kind_of_function(self.function, tuple(flat[i].ndim for i in tensors))
        call = _TracedCall(next(tracing.numbers), kind, name, 0, self.place)
        for position, (i, strategy) in enumerate(zip(tensors, self.inputs, strict=False)):
            if strategy is not None:
                flat[i] = call.mark(flat[i], strategy, f"in{position}")
        args, kwargs = pytree.tree_unflatten(flat, structure)
        if not self.cross_batch or not tracing.batch.can_enter:
            return call.mark_results(self.function(*args, **kwargs), self.outputs)
        entered = EnteredCall(tracing.batch, PartCall(call.number, name, self.place))
        args, kwargs = entered.enter((args, kwargs))
        return call.mark_results(entered.leave(self.function(*args, **kwargs)), self.outputs)


def marked_tensor(x: torch.Tensor, strategy: TensorStrategy, place: str) -> torch.Tensor:
    """The tensor, which is marked while a step is traced. Raises ConfigValueError if the strategy does not fit it."""
    tracing = _tracing.get()
    if tracing is None:
        return x
    check_shape(strategy, x.shape, f"{place}: the strategy of a tensor")
    return _TracedCall(next(tracing.numbers), "tensor", "a tensor", 0, place).mark(x, strategy, "in0")


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function in messages and graphs, without addresses: all ranks have the same graph."""
    if isinstance(function, partial):
        return name_of(function.func)
    name = str(getattr(function, "__name__", None) or type(function).__name__)
    return f"torch.{name}" if getattr(torch, name, None) is function else name


@dataclass(frozen=True)
class _TracedCall:
    number: int
    kind: str
    subject: str
    index: int
    place: str
    gradient: bool = True

    def mark(self, x: torch.Tensor, strategy: TensorStrategy, position: str) -> torch.Tensor:
        mark = NodeMark(strategy, self.number, self.kind, self.subject, self.index, position, False, self.place)
        return mark_tensor(x, mark, self.gradient)

    def mark_results(self, results: Any, strategies: tuple[TensorStrategy | None, ...]) -> Any:
        """Mark the first tensors among the results of the call; returns the results."""
        if not any(strategies):
            return results
        flat, structure = pytree.tree_flatten(results)
        tensors = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]
        if len(strategies) > len(tensors):
            raise ConfigValueError(
                f"{self.place}: out_strategy of {self.subject} has {len(strategies)} entries, but it returns "
                f"{len(tensors)} tensors; give at most one per tensor"
            )
        for position, (i, strategy) in enumerate(zip(tensors, strategies, strict=False)):
            if strategy is not None:
                flat[i] = self.mark(flat[i], strategy, f"out{position}")
        return pytree.tree_unflatten(flat, structure)


@dataclass
class _ModuleHooks:
    """Hooks that mark inputs and results of one module. Its calls may nest, as with activation checkpointing."""

    module: nn.Module
    path: str
    index: int
    mark: ModuleMark
    numbers: Iterator[int]
    open: list[_TracedCall] = field(default_factory=list)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mark = self.mark
        kind = kind_of_module(module)
        call = _TracedCall(next(self.numbers), kind, self.path, self.index, mark.place, mark.gradient)
        self.open.append(call)
        given, named = list(args), dict(kwargs)
        for key, strategy in mark.inputs:
            held, at = self._slot(key, given, named)
            if not isinstance(held[at], torch.Tensor):
                raise ConfigValueError(
                    f"{mark.place}: input {at!r} of module {self.path or 'the model'} is marked {strategy}, but is "
                    f"{show(held[at])}; give None for what is no tensor"
                )
            held[at] = call.mark(held[at], strategy, f"in{key}" if isinstance(key, int) else f"in:{key}")
        return tuple(given), named

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.open.pop().mark_results(output, self.mark.outputs)

    def _slot(self, key: int | str, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The list or dict that holds an input, and its index or key. Raises ConfigValueError if it is missing."""
        if isinstance(key, int) and key < len(args):
            return args, key
        names = list(inspect.signature(self.module.forward).parameters)
        name = key if isinstance(key, str) else names[key] if key < len(names) else ""
        if name in kwargs:
            return kwargs, name
        if name in names and names.index(name) < len(args):
            return args, names.index(name)
        raise ConfigValueError(
            f"{self.mark.place}: in_strategy of module {self.path or 'the model'} marks its input {key!r}, but forward "
            f"is called with {len(args)} positional inputs and {', '.join(kwargs) or 'no named ones'}; give None for "
            "an input that is not there"
        )
