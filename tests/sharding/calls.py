"""Calls of the basic ops, and the strategies that they must have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

aten = torch.ops.aten

Tensor = torch.Tensor


@dataclass(frozen=True)
class Case:
    """A call, and strategies that it must have; `without` must not be among them."""

    target: Any
    args: tuple[Any, ...]
    having: tuple[str, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        name = getattr(self.target, "__name__", self.target)
        return f"{name}({', '.join(_short(arg) for arg in self.args)})"


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return "x".join(map(str, value.shape)) or "scalar"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_short(item) for item in value) + "]"
    return str(value)


def case(target: Any, *args: Any, having: str, without: str = "", **kwargs: Any) -> Case:
    """`having`, `without`: strategies as `describe` writes them, with bars between."""
    return Case(target, args, _listed(having), kwargs, _listed(without))


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split("|") if part.strip())


def x(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def with_nan(*shape: int) -> Tensor:
    """Some ranks have a NaN that others do not have."""
    found = x(*shape)
    found.view(-1)[[0, -1]] = torch.nan
    return found


def positive(*shape: int) -> Tensor:
    return x(*shape).abs() + 0.1


def mask(*shape: int) -> Tensor:
    return x(*shape) > 0


def ints(high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(high))


def z(*shape: int) -> Tensor:
    return torch.complex(x(*shape), x(*shape).flip(-1))
