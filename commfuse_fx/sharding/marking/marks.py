"""The marks of `cf.shard` on modules and parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.sharding.marking.check_shape import check_shape
from commfuse_fx.sharding.marking.logical import kind_of_module
from commfuse_fx.sharding.marking.strategy import TensorStrategy

_MARKS = "_commfuse_marks"
"""The attribute of a module or a parameter that holds its marks."""

_made = 0


@dataclass(frozen=True)
class ModuleMark:
    """The mark that one call of `cf.shard` puts on a module.

    inputs: strategies of inputs, by position or by name in forward.
    outputs: one strategy per result; None for a result without a mark.
    parameters: strategies of parameters, by their name in the module.
    gradient: whether the gradients of inputs and results get the same layouts.
    place: the source line of the call, `file:line`.
    cross_batch: whether a rank computes the module with its own part of the batch.
    """

    inputs: tuple[tuple[int | str, TensorStrategy], ...]
    outputs: tuple[TensorStrategy | None, ...]
    parameters: tuple[tuple[str, TensorStrategy], ...]
    gradient: bool
    place: str
    cross_batch: bool = False

    @property
    def on_activations(self) -> bool:
        return bool(self.inputs or any(self.outputs))

    @property
    def has_layouts(self) -> bool:
        return self.on_activations or bool(self.parameters)


@dataclass(frozen=True)
class ParameterMark:
    """The mark that one call of `cf.shard` puts on a parameter. place: the source line of the call, `file:line`."""

    strategy: TensorStrategy
    place: str


@dataclass(frozen=True)
class MarkedModule:
    """A mark of the module at `path`.

    index: the number of the mark among those of the module. kind: as in `logical_dims`.
    parameters: names and shapes of the marked parameters, in the order of `mark.parameters`.
    """

    path: str
    index: int
    kind: str
    mark: ModuleMark
    parameters: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class MarkedParameter:
    """A mark of one parameter, by the name that named_parameters() gives it."""

    name: str
    shape: tuple[int, ...]
    mark: ParameterMark


@dataclass(frozen=True)
class Marks:
    """All marks that a model carries, in the order of named_modules() and named_parameters()."""

    modules: tuple[MarkedModule, ...] = ()
    parameters: tuple[MarkedParameter, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.modules or self.parameters)


def collect(model: nn.Module) -> Marks:
    """All marks on the model's modules and parameters. Tied parameters are one, under their first name.

    Raises ConfigValueError for a mark of a parameter that has been removed or renamed since, as pruning and
    parametrizations do.
    """
    names: dict[int, str] = {}
    modules: list[MarkedModule] = []
    parameters: list[MarkedParameter] = []
    for name, param in model.named_parameters():
        names[id(param)] = name
        marks = marks_of(param)
        parameters.extend(MarkedParameter(name, tuple(param.shape), mark) for mark in marks)
    for path, module in model.named_modules():
        for index, mark in enumerate(marks_of(module)):
            owned = [_marked(module, path, mark, name, strategy) for name, strategy in mark.parameters]
            named = tuple((names[id(param)], tuple(param.shape)) for param in owned)
            modules.append(MarkedModule(path, index, kind_of_module(module), mark, named))
    return Marks(tuple(modules), tuple(parameters))


def add_module_mark(module: nn.Module, path: str, mark: ModuleMark) -> None:
    """Check a mark against the module's parameters, and add it.

    Raises ConfigValueError if the module has no such parameter, or if a strategy does not fit its shape.
    """
    for name, strategy in mark.parameters:
        param = _marked(module, path, mark, name, strategy)
        label = f"{path}.{name}" if path else name
        check_shape(strategy, param.shape, f"{mark.place}: the strategy of parameter {label}")
    add_mark(module, mark)


def _marked(module: nn.Module, path: str, mark: ModuleMark, name: str, strategy: TensorStrategy) -> nn.Parameter:
    found = dict(module.named_parameters(remove_duplicate=False))
    if name not in found:
        raise ConfigValueError(
            f"{mark.place}: module {path or type(module).__name__} has no parameter {name!r}, which is marked "
            f"{strategy}; it has {', '.join(found) or 'none'}"
        )
    return found[name]


def marks_of(holder: nn.Module | torch.Tensor) -> tuple[Any, ...]:
    """The marks of one module or parameter, in the order in which they were made."""
    found: tuple[Any, ...] = getattr(holder, _MARKS, ())
    return found


def add_mark(holder: nn.Module | torch.Tensor, mark: Any) -> None:
    """Add a mark, unless the same line has said the same before."""
    global _made
    if mark not in marks_of(holder):
        setattr(holder, _MARKS, (*marks_of(holder), mark))
        _made += 1


def marks_made() -> int:
    """The number of marks that this process has added so far, to see whether there are new ones."""
    return _made
