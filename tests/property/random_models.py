"""Small models put together at random from parts that each do one thing a compiler could get wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.property.attribute_parts import ATTRIBUTE_PARTS
from tests.property.plain_parts import PLAIN_PARTS
from tests.property.strange_parts import STRANGE_PARTS

PARTS = {**PLAIN_PARTS, **STRANGE_PARTS, **ATTRIBUTE_PARTS}
"""Kind -> class of a module that is made of (random, width) and maps (rows of that width, tokens) to such rows."""

TOKENS = 7
LOSSES = ("mse", "cross_entropy", "smooth", "inside", "mapping")


@dataclass(frozen=True)
class PartSpec:
    """One part of a model; `seed` decides everything about it that its kind leaves open."""

    kind: str
    seed: int


@dataclass(frozen=True)
class ModelSpec:
    """`ties`: pairs of places, the second of which gets the weight (or, where it has none like it, the module) of the
    first."""

    seed: int
    parts: tuple[PartSpec, ...]
    ties: tuple[tuple[int, int], ...]
    width: int
    classes: int
    dtype: torch.dtype
    loss: str

    def __str__(self) -> str:
        parts = ", ".join(f"{part.kind}({part.seed})" for part in self.parts)
        return f"width {self.width}, {self.dtype}, loss {self.loss}: [{parts}], ties {list(self.ties)}"


class RandomModel(nn.Module):
    """The parts one after the other, then a linear head; with the loss inside where `loss` says so."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.inside = spec.loss in ("inside", "mapping")
        self.as_mapping = spec.loss == "mapping"
        self.parts = nn.ModuleList(PARTS[part.kind](random.Random(part.seed), spec.width) for part in spec.parts)
        for first, second in spec.ties:
            self._tie(first % max(1, len(self.parts)), second % max(1, len(self.parts)))
        self.head = nn.Linear(spec.width, spec.classes)
        self._gain = 1.0

    def _tie(self, first: int, second: int) -> None:
        if not len(self.parts) or first == second:
            return
        one, other = self.parts[first], self.parts[second]
        mine, theirs = getattr(one, "weight", None), getattr(other, "weight", None)
        if isinstance(mine, nn.Parameter) and isinstance(theirs, nn.Parameter) and mine.shape == theirs.shape:
            other.weight = mine
        else:
            self.parts[second] = one

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, target: torch.Tensor | None = None) -> Any:
        for part in self.parts:
            x = part(x, tokens)
        x = self.head(x)
        if self._gain != 1.0:
            x = x * self._gain
        if not self.inside:
            return x
        assert target is not None
        loss = F.mse_loss(x, target)
        return {"loss": loss, "output": x} if self.as_mapping else loss


def build(spec: ModelSpec) -> RandomModel:
    """The same model at every call, with values away from the zeros and ones that hide mistakes."""
    with default_dtype(spec.dtype):
        torch.manual_seed(spec.seed)
        model = RandomModel(spec)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.ndim <= 1 and tensor.is_floating_point():
                    tensor.add_(torch.rand(tensor.shape) * 0.2 + 0.05)
    return model


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make_loss(spec: ModelSpec) -> Any:
    """The loss function given to `compile`, or None where the model returns its loss."""
    if spec.loss == "mse":
        return F.mse_loss
    if spec.loss == "cross_entropy":
        return F.cross_entropy
    return nn.SmoothL1Loss(beta=1.0) if spec.loss == "smooth" else None


def make_batch(spec: ModelSpec, rows: int, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The arguments of one call; dimension 0 of each is `rows`."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, spec.width, generator=source, dtype=torch.float64).to(dtype)
    tokens = torch.randint(TOKENS, (rows,), generator=source)
    if spec.loss == "cross_entropy":
        return x, tokens, torch.randint(spec.classes, (rows,), generator=source)
    return x, tokens, torch.randn(rows, spec.classes, generator=source, dtype=torch.float64).to(dtype)


def eager_loss(model: nn.Module, loss_fn: Any, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    if loss_fn is None:
        output = model(*batch)
        loss: torch.Tensor = output["loss"] if isinstance(output, dict) else output
        return loss
    loss = loss_fn(model(*batch[:-1]), batch[-1])
    return loss
