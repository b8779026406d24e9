"""Which objects a call takes besides tensors: constants, containers, and classes registered with pytree."""

from __future__ import annotations

import collections
import enum
import functools
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import commfuse_fx as cf


@pytest.fixture(autouse=True)
def _unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are not what is tested here: leave out their verification, which takes most of the time."""
    monkeypatch.setenv("COMMFUSE_VERIFY", "0")


class Pair:
    """Two tensors, and how to put them together."""

    def __init__(self, one: torch.Tensor, two: torch.Tensor, settings: list[Any]) -> None:
        self.one, self.two, self.settings = one, two, settings

    def together(self) -> torch.Tensor:
        return self.one * self.settings[0] + self.two * self.settings[1]["weight"]


@dataclass
class Batch:
    value: torch.Tensor
    scale: float
    name: Any = None

    def together(self) -> torch.Tensor:
        return self.value * self.scale


@dataclass(frozen=True)
class Power:
    exponent: int

    def together(self) -> torch.Tensor:
        return torch.full((3, 4), 2.0) ** self.exponent


class Unknown:
    pass


pytree.register_pytree_node(
    Pair, lambda pair: ([pair.one, pair.two], pair.settings), lambda items, settings: Pair(*items, settings)
)
pytree.register_dataclass(Batch, field_names=["value", "scale"], drop_field_names=["name"])
pytree.register_constant(Power)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, other: Any = None) -> torch.Tensor:
        if isinstance(other, (Pair, Batch, Power)):
            x = x + other.together()
        elif isinstance(other, (list, collections.deque)):
            x = x + other[0].together()
        elif callable(other):
            x = other(x)
        elif isinstance(other, (float, np.floating)):
            x = x * torch.tensor(other).reciprocal().sign()
        y: torch.Tensor = self.lin(x)
        return y


def _plans(compiled: Any) -> int:
    return len((compiled if hasattr(compiled, "planner") else compiled._compiled).planner.plans)


def _calls(form: str, net: nn.Module) -> tuple[Any, Callable[..., torch.Tensor]]:
    if form == "module":
        module = cf.compile(net)
        return module, lambda *args: module(*args).sum()
    step = cf.compile(net, loss_fn=lambda output, target: output.sum())
    return step, lambda *args: step(*args, None)


def _check(form: str, values: list[Any], graphs: int) -> None:
    """Losses and gradients are those of eager torch."""
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    compiled, call = _calls(form, net)
    for value in values:
        for each in (net, twin):
            each.zero_grad()
        x = torch.randn(3, 4)
        want, loss = twin(x, value).sum(), call(x, value)
        torch.testing.assert_close(loss.detach(), want.detach())
        want.backward()
        if form == "module":
            loss.backward()  # type: ignore[no-untyped-call]
        for one, two in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad)
    assert _plans(compiled) == graphs
    lowered = compiled.lower(x, value, *([] if form == "module" else [None]))
    assert "addmm" in lowered.text() and _plans(compiled) == graphs


def _tensor() -> torch.Tensor:
    return torch.randn(3, 4)


@pytest.mark.parametrize("form", ["module", "step"])
def test_registered_classes_are_taken(form: str) -> None:
    """Their tensors are inputs of the graph; what else they hold is compared."""
    settings = [2.0, {"weight": 3}]
    pairs = [Pair(_tensor(), _tensor(), settings) for _ in range(2)]
    _check(form, [*pairs, Pair(_tensor(), _tensor(), [2.0, {"weight": 4}]), pairs[0]], graphs=2)
    batches = [Batch(_tensor(), 2.0, Unknown()), Batch(_tensor(), 2.0, Unknown()), Batch(_tensor(), 3.0)]
    _check(form, [*batches, collections.deque([batches[0]]), [pairs[0]]], graphs=4)
    _check(form, [Power(2), Power(3), Power(2)], graphs=2)


def test_a_list_that_a_registered_class_keeps_may_change() -> None:
    net, pair = Net(), Pair(_tensor(), _tensor(), [2.0, {"weight": 3}])
    compiled, call = _calls("module", net)
    x = torch.randn(3, 4)
    for number in (3, 5):
        pair.settings[1]["weight"] = number
        torch.testing.assert_close(call(x, pair), net(x, pair).sum())
    assert _plans(compiled) == 2


def test_gradients_reach_the_tensors_of_a_registered_class() -> None:
    pair = Pair(_tensor().requires_grad_(), _tensor(), [2.0, {"weight": 3}])
    net = Net()
    cf.compile(net)(torch.randn(3, 4), pair).sum().backward()
    torch.testing.assert_close(pair.one.grad, 2 * net.lin.weight.detach().sum(0).expand(3, 4))


class Color(enum.Enum):
    RED = 1


CONSTANTS: dict[str, tuple[list[Any], int]] = {
    "functions": ([torch.relu, torch.tanh, torch.relu], 2),
    "lambdas": ([(lambda x: x * 2) for _ in range(3)], 1),
    "zeros": ([0.0, -0.0, 0.0], 2),
    "numpy": ([np.float32(2), np.float32(-2), np.float32(2)], 2),
    "not a number": ([float("nan"), float("nan")], 1),
    "members of a set": ([frozenset([2]), frozenset([2.0]), frozenset([2])], 2),
    "others": ([range(3), range(3), frozenset([1]), ..., pathlib.Path("."), b"x", Color.RED, torch.Size([2])], 7),
}


@pytest.mark.parametrize("kind", CONSTANTS)
def test_constants_are_compared(kind: str) -> None:
    _check("module", *CONSTANTS[kind])


@pytest.mark.parametrize(
    "value",
    [
        Unknown(),
        {1},
        SimpleNamespace(a=1),
        functools.partial(torch.add, 1),
        torch.Generator(),
        nn.ReLU(),
        np.ones(2),
        (lambda y: lambda x: x + y)(1),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("form", ["module", "step"])
def test_others_are_refused_with_both_ways_out(value: Any, form: str) -> None:
    _, call = _calls(form, Net())
    name = type(value).__name__
    with pytest.raises(
        cf.ConfigTypeError, match=f'argument input.1.key of type {name} .*pytree.*capture="dynamo"'
    ) as e:
        call(torch.randn(3, 4), {"key": value})
    assert ("torch.from_numpy" in str(e.value)) == isinstance(value, np.ndarray)


def test_a_context_that_cannot_be_compared_is_refused() -> None:
    _, call = _calls("module", Net())
    for settings, why in (([_tensor()], "holds a tensor"), ([{1}], "cannot be hashed")):
        with pytest.raises(cf.ConfigTypeError, match=why):
            call(torch.randn(3, 4), Pair(_tensor(), _tensor(), settings))
