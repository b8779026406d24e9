"""What a graph was traced for: anything here that changes means another graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from commfuse_fx.capture.tree import Structure
from commfuse_fx.optim import optimizer_key


@dataclass(frozen=True)
class Signature:
    """Hashable. The names of the fields are what a re-trace is explained with."""

    argument_structure: Structure
    tensors: tuple[Any, ...]
    strides_of_parameters_or_buffers: int
    train_or_eval_mode: tuple[bool, ...]
    requires_grad: tuple[bool, ...]
    autocast: tuple[Any, ...]
    optimizer: Any

    def difference(self, other: Signature) -> str:
        """What has changed since `other`, in words."""
        changed = [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]
        text = ", ".join(name.replace("_", " ") for name in changed) or "it was evicted from the cache"
        if changed == ["tensors"]:
            pairs = zip(other.tensors, self.tensors, strict=False)
            old, new = next((a, b) for a, b in pairs if a != b)
            text = f"an input changed from {old[1]}{list(old[0])} to {new[1]}{list(new[0])}"
        return f"{text} changed" if changed != ["tensors"] else text


class Watch:
    """Looks at model and optimizer before every step, cheaply, and knows when parameters were replaced."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._modules: list[nn.Module] = []
        self._laid_out: list[torch.Tensor] = []
        self._known_strides: dict[tuple[Any, ...], int] = {}
        self._strides: tuple[tuple[Any, ...] | None, int] = (None, 0)
        self._slots: list[tuple[dict[str, Any], str, Any]] = []
        self.params: Mapping[str, nn.Parameter] = {}
        self.buffers: Mapping[str, torch.Tensor] = {}
        self._look()

    def _look(self) -> None:
        self._modules = list(self._model.modules())
        self.params = dict(self._model.named_parameters())
        self.buffers = dict(self._model.named_buffers())
        held = (*self.params.values(), *self.buffers.values())
        self._laid_out = [each for each in held if not is_lazy(each)]
        self._slots = [
            (slots, name, value)
            for module in self._modules
            for slots in (module._parameters, module._buffers)
            for name, value in slots.items()
        ]

    def signature(self, structure: Structure, tensors: Sequence[torch.Tensor]) -> Signature:
        """The signature of a call with these tensors, as things stand now."""
        if any(slots.get(name) is not value for slots, name, value in self._slots):
            self._look()
        return Signature(
            structure,
            tuple((t.shape, t.dtype, t.device, t.stride(), t.requires_grad) for t in tensors),
            self._number_of_strides(),
            tuple(module.training for module in self._modules),
            tuple(param.requires_grad for param in self.params.values()),
            _autocast(),
            None if self._optimizer is None else optimizer_key(self._optimizer),
        )

    def _number_of_strides(self) -> int:
        """One for each way in which parameters and buffers have lain: strides of hundreds are slow to hash."""
        strides = tuple(map(torch.Tensor.stride, self._laid_out))
        if strides != self._strides[0]:
            self._strides = strides, self._known_strides.setdefault(strides, len(self._known_strides))
        return self._strides[1]


def _autocast() -> tuple[Any, ...]:
    return tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in ("cpu", "cuda")
    )
