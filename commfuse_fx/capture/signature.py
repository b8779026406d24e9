"""What a graph was traced for: anything here that changes means another graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, ValuesView
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from commfuse_fx.capture.model_structure import ModelStructure
from commfuse_fx.capture.tree import Structure
from commfuse_fx.optim import optimizer_key

_IS_TRAINING = operator.attrgetter("training")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_DTYPE = operator.attrgetter("dtype")


@dataclass(frozen=True)
class Signature:
    """Hashable. The names of the fields are what a re-trace is explained with."""

    argument_structure: Structure
    tensors: tuple[Any, ...]
    model: ModelStructure
    layout_of_parameters_or_buffers: int
    train_or_eval_mode: tuple[bool, ...]
    gradients: bool
    requires_grad: tuple[bool, ...]
    autocast: tuple[Any, ...]
    optimizer: Any

    def difference(self, other: Signature) -> str:
        """What has changed since `other`, in words."""
        changed = [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]
        if "model" in changed:  # modes and the optimizer change with it
            return self.model.difference(other.model)
        if changed == ["tensors"]:
            pairs = zip(other.tensors, self.tensors, strict=False)
            old, new = next((a, b) for a, b in pairs if a != b)
            return f"an input changed from {old[1]}{list(old[0])} to {new[1]}{list(new[0])}"
        text = ", ".join(name.replace("_", " ") for name in changed) or "it was evicted from the cache"
        return f"{text} changed"


class Watch:
    """Looks at model and optimizer before every step, cheaply, and knows when modules, parameters or buffers have been
    replaced, added or removed."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._modules: list[nn.Module] = []
        self._laid_out: list[torch.Tensor] = []
        self._known_layouts: dict[tuple[Any, ...], int] = {}
        self._layout: tuple[tuple[Any, ...] | None, int] = (None, 0)
        self._structure: ModelStructure | None = None  # until the first look
        # Dicts in which modules hold their parameters, buffers and submodules, and what they held at the last look.
        self._empty: list[dict[str, Any]] = []
        self._filled: list[dict[str, Any]] = []
        self._views: list[ValuesView[Any]] = []
        self._names: list[str] = []
        self._held: list[Any] = []
        self._parameter_names: dict[int, str] = {}
        self.params: Mapping[str, nn.Parameter] = {}
        self.buffers: Mapping[str, torch.Tensor] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy looks at its own model first."""
        return Watch, (self._model, self._optimizer)

    @property
    def structure(self) -> ModelStructure:
        """That of the model, as it was at the last look."""
        assert self._structure is not None, "a signature was asked for"
        return self._structure

    @property
    def trains(self) -> bool:
        """Whether a call made now computes gradients."""
        return self._model.training and torch.is_grad_enabled()

    def _look(self) -> None:
        self._structure = ModelStructure.of(self._model)
        self._modules = list(self._model.modules())
        self.params = dict(self._model.named_parameters())
        self.buffers = dict(self._model.named_buffers())
        held = (*self.params.values(), *self.buffers.values())
        self._laid_out = [each for each in held if not is_lazy(each)]
        self._parameter_names = {id(param): name for name, param in self.params.items()}
        dicts = [held for module in self._modules for held in (module._parameters, module._buffers, module._modules)]
        self._empty = [held for held in dicts if not held]
        self._filled = [held for held in dicts if held]
        self._views = [held.values() for held in self._filled]
        self._names = list(chain.from_iterable(self._filled))
        self._held = list(chain.from_iterable(self._views))

    def _is_up_to_date(self) -> bool:
        # Without a line of Python per module: this runs before every step.
        return (
            self._structure is not None
            and not any(self._empty)
            and list(chain.from_iterable(self._filled)) == self._names
            and all(map(operator.is_, chain.from_iterable(self._views), self._held))
        )

    def signature(self, structure: Structure, tensors: Sequence[torch.Tensor]) -> Signature:
        """The signature of a call with these tensors, as things stand now."""
        if not self._is_up_to_date():
            self._look()
        return Signature(
            structure,
            tuple((t.shape, t.dtype, t.device, t.stride(), t.requires_grad) for t in tensors),
            self.structure,
            self._number_of_layouts(),
            tuple(map(_IS_TRAINING, self._modules)),
            self.trains,
            tuple(map(_REQUIRES_GRAD, self.params.values())),
            _autocast(),
            None if self._optimizer is None else optimizer_key(self._optimizer, self._parameter_names),
        )

    def _number_of_layouts(self) -> int:
        """One for each way in which parameters and buffers have lain: strides of hundreds are slow to hash."""
        layout = (*map(torch.Tensor.stride, self._laid_out), *map(_DTYPE, self._laid_out))
        if layout != self._layout[0]:
            self._layout = layout, self._known_layouts.setdefault(layout, len(self._known_layouts))
        return self._layout[1]


def _autocast() -> tuple[Any, ...]:
    return tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in ("cpu", "cuda")
    )
