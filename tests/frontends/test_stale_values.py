"""Values in places that users rarely write to: functions, containers of the standard library, flags of hooks."""

from __future__ import annotations

import functools
import logging
from array import array
from collections import ChainMap, UserDict, UserList
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf


@pytest.fixture(autouse=True)
def _unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMFUSE_VERIFY", "0")


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    return torch.randn(3, 4), torch.randn(3, 2)


class Scaled(nn.Module):
    """Multiplies its output by a number that `read` finds in `self.held`."""

    def __init__(self, held: Any, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.held = held
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.read(self.held)


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == level and "re-tracing" in each.getMessage()]


_INNER = {"a": 1.0}
HELD: dict[str, tuple[Any, Callable[[Any], float], Callable[[Any], Any]]] = {
    "UserDict": (UserDict(a=1.0), lambda held: held["a"], lambda held: held.update(a=2.0)),
    "UserList": (UserList([1.0]), lambda held: held[0], lambda held: held.__setitem__(0, 2.0)),
    "ChainMap": (ChainMap({}, {"a": 1.0}), lambda held: held["a"], lambda held: held.maps[1].update(a=2.0)),
    "mappingproxy": (MappingProxyType(_INNER), lambda held: held["a"], lambda held: _INNER.update(a=2.0)),
    "bytearray": (bytearray(b"\x01"), lambda held: held[0], lambda held: held.__setitem__(0, 2)),
    "array": (array("d", [1.0]), lambda held: held[0], lambda held: held.__setitem__(0, 2.0)),
}


@pytest.mark.parametrize("name", HELD)
def test_containers_of_the_standard_library_are_looked_into(name: str) -> None:
    held, read, change = HELD[name]
    net = Scaled(held, read)
    step = cf.compile(net, loss_fn=F.mse_loss)
    x, y = batch()
    step(x, y)
    change(held)
    torch.testing.assert_close(step(x, y), F.mse_loss(net(x), y).detach())


def _by_default(output: torch.Tensor, target: torch.Tensor, scale: float = 1.0, *, shift: float = 0.0) -> torch.Tensor:
    return F.mse_loss(output, target) * scale + shift


def _in_a_list(output: torch.Tensor, target: torch.Tensor, scales: list[float] = [1.0]) -> torch.Tensor:  # noqa: B006
    return F.mse_loss(output, target) * scales[0]


def _summed(output: torch.Tensor, target: torch.Tensor, scales: list[float]) -> torch.Tensor:
    return (output - target).sum()


def _with_attribute() -> Any:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scale: float = loss.scale  # type: ignore[attr-defined]
        return F.mse_loss(output, target) * scale

    loss.scale = 1.0  # type: ignore[attr-defined]
    return loss


class DictLoss(dict[str, Any]):
    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target) * self.scale


LOSSES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "default": (_by_default, lambda loss: setattr(loss, "__defaults__", (3.0,))),
    "keyword default": (_by_default, lambda loss: loss.__kwdefaults__.update(shift=3.0)),
    "item of a default": (_in_a_list, lambda loss: loss.__defaults__[0].__setitem__(0, 3.0)),
    "code": (_in_a_list, lambda loss: setattr(loss, "__code__", _summed.__code__)),
    "attribute of a function": (_with_attribute(), lambda loss: setattr(loss, "scale", 3.0)),
    "attribute of a dict": (DictLoss(), lambda loss: setattr(loss, "scale", 3.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_functions_and_containers_with_attributes_are_noticed(name: str) -> None:
    loss_fn, change = LOSSES[name]
    net = nn.Linear(4, 2)
    step = cf.compile(net, loss_fn=loss_fn, form="step")
    x, y = batch()
    first = step(x, y)
    change(loss_fn)
    second = step(x, y)
    torch.testing.assert_close(second, loss_fn(net(x), y).detach())
    assert not torch.equal(first, second)


def _hook(module: nn.Module, *given: Any) -> torch.Tensor:
    output: torch.Tensor = given[-1]
    return output * len(given)


def test_a_hook_that_is_called_in_another_way(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Linear(4, 2)
    handle = net.register_forward_hook(_hook)
    step = cf.compile(net, loss_fn=F.mse_loss)
    x, y = batch()
    for with_kwargs in (True, False, True):
        step(x, y)
        handle.remove()
        handle = net.register_forward_hook(_hook, with_kwargs=with_kwargs)
        with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
            torch.testing.assert_close(step(x, y), F.mse_loss(net(x), y).detach())
    assert len(messages(caplog, logging.INFO)) == 1, "each way has its graph"


def test_equal_partials_and_methods_trace_nothing_again(caplog: pytest.LogCaptureFixture) -> None:
    net = Scaled(functools.partial(float, "2.0"), lambda held: held())
    net.read = net.read.__call__  # type: ignore[method-assign, operator]
    step = cf.compile(net, loss_fn=F.mse_loss)
    x, y = batch()
    with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
        for _ in range(3):
            step(x, y)
            net.held = functools.partial(float, "2.0")
        assert messages(caplog, logging.INFO) == []
        net.held = functools.partial(float, "3.0")
        torch.testing.assert_close(step(x, y), F.mse_loss(net(x), y).detach())


def test_a_module_in_a_closure_of_the_loss_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    net, other = nn.Linear(4, 2), nn.Linear(2, 2).requires_grad_(False)
    step = cf.compile(net, loss_fn=lambda output, target: F.mse_loss(other(output), target))
    x, y = batch()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            torch.testing.assert_close(step(x, y), F.mse_loss(other(net(x)), y).detach())
    assert not [each for each in caplog.records if each.name == "commfuse_fx.retrace"]


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.scale = 1.0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target) ** 2 * self.weight).mean() * self.scale


@pytest.mark.parametrize("grad", [None, 7.0])
def test_gradients_of_a_loss_are_not_computed_and_said_so(grad: float | None, caplog: pytest.LogCaptureFixture) -> None:
    net, loss_fn = nn.Linear(4, 2), Weighted()
    kept = loss_fn.weight.grad = None if grad is None else torch.full((2,), grad)
    step = cf.compile(net, loss_fn=loss_fn, form="step")
    x, y = batch()
    for scale in (1.0, 2.0):
        loss_fn.scale = scale
        net.zero_grad()
        loss = step(x, y)
        expected = loss_fn(net(x), y)
        torch.testing.assert_close(loss, expected.detach())
        (gradient,) = torch.autograd.grad(expected, [net.weight])
        torch.testing.assert_close(net.weight.grad, gradient)
        assert loss_fn.weight.grad is kept
    if kept is not None:
        assert kept.tolist() == [7.0, 7.0]
    said = [each.getMessage() for each in caplog.records if "require a gradient" in each.getMessage()]
    assert len(said) == 1 and "(shapes: [2])" in said[0]


class Penalised(nn.Module):
    """With the gradient of its output by its input, as models of physics have it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        out: torch.Tensor = self.linear(x).tanh()
        if torch.is_grad_enabled():
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            out = out + slope.square().sum()
        return out


def test_leaves_that_the_forward_makes_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    net = Penalised()
    step = cf.compile(net, loss_fn=F.mse_loss)
    x, y = batch()
    torch.testing.assert_close(step(x, y), (expected := F.mse_loss(net(x), y)).detach())
    torch.testing.assert_close(net.linear.weight.grad, torch.autograd.grad(expected, net.linear.weight)[0])
    assert not [each for each in caplog.records if each.levelno == logging.WARNING]
