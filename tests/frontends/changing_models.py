"""Models and batches of the tests of changed values, and what was logged of re-tracing."""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn


@dataclass
class Settings:
    scale: float = 1.0
    inner: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(shift=0.5, sizes=[2, 3]))


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Lookup:
    """Attributes come from somewhere else."""

    def __init__(self) -> None:
        self._values = {"scale": 1.0}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(name) from None


class Scale:
    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, *values: Any) -> Any:
        return values[-1] * self.factor


def plus(x: torch.Tensor, y: float = 0.0) -> torch.Tensor:
    return x + y


class Net(nn.Module):
    by_class = 1.0
    table: ClassVar = {"scale": 1.0}

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.0)
        self.last = nn.Linear(8, 4)
        self.scale = 1.0
        self.unread = 0.0
        self.sizes = [1, 2.0]
        self.nested = {"a": {"b": [1.0]}}
        self.flags = {"double"}
        self.array = np.ones(2)
        self.settings = Settings()
        self.namespace = argparse.Namespace(scale=1.0)
        self.slotted = Slotted()
        self.lookup = Lookup()
        self.call = Scale()
        self.partial = functools.partial(plus, y=1.0)
        self.method = Scale().__call__
        self.mask = torch.ones(8)
        self._hidden = 1.0

    @property
    def hidden(self) -> float:
        return self._hidden

    def factor(self) -> float:
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(x)) * self.mask
        x = x * self.scale * self.by_class * self.table["scale"] * self.sizes[1] * self.nested["a"]["b"][0]
        x = x * float(self.array[0]) * self.settings.scale + self.settings.inner.shift * self.settings.inner.sizes[0]
        x = x * self.namespace.scale * self.slotted.scale * self.lookup.scale * self.hidden * self.factor()
        x = self.method(self.partial(self.call(x)))
        x = x * 2 if "double" in self.flags else x
        return self.last(x * getattr(self, "extra", 1.0))


def values(count: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(5)
    return [(torch.randn(6, 8), torch.randn(6, 4)) for _ in range(count)]


def made() -> Net:
    """An instance of classes of its own, which may be changed."""
    torch.manual_seed(0)
    own = type("Own", (Net,), {"by_class": 1.0})
    net: Net = type("Net", (own,), {})()
    return net


def doubled(*values: Any) -> Any:
    """A hook: twice what was computed."""
    return values[-1] * 2


def retraced(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "commfuse_fx.retrace" and each.levelno == 20]
