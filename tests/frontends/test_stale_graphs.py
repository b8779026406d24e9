"""Whatever attribute a trace has read may change between steps: the step then runs what eager execution would."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.capture.guards.noted_classes import _originals
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.frontends.changing_models import Net, Settings, made, retraced, values
from tests.models import shards


@pytest.fixture(autouse=True)
def _unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are not what is tested here: leave out their verification, which takes most of the time."""
    monkeypatch.setenv("COMMFUSE_VERIFY", "0")


def _forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * 3


def _another_class(net: Net) -> None:
    net.__class__ = type("Other", (Net,), {"by_class": 3.0})


CHANGES: dict[str, tuple[Callable[[Net], Any], str]] = {
    "number": (lambda net: setattr(net, "scale", 3.0), "attribute Net.scale: 1.0 -> 3.0"),
    "type of a number": (lambda net: setattr(net, "scale", 1), "attribute Net.scale: 1.0 -> 1"),
    "dropout rate": (lambda net: setattr(net.drop, "p", 1.0), "attribute drop.p: 0.0 -> 1.0"),
    "eps of a norm": (lambda net: setattr(net.norm, "eps", 1.0), "attribute norm.eps: 1e-05 -> 1.0"),
    "item of a list": (lambda net: net.sizes.__setitem__(1, 5.0), "attribute Net.sizes[1]: 2.0 -> 5.0"),
    "another list": (lambda net: setattr(net, "sizes", [1, 7.0]), "attribute Net.sizes[1]: 2.0 -> 7.0"),
    "nested item": (lambda net: net.nested["a"]["b"].__setitem__(0, 3.0), "Net.nested['a']['b'][0]: 1.0 -> 3.0"),
    "set": (lambda net: net.flags.clear(), "attribute Net.flags: "),
    "array": (lambda net: net.array.fill(4.0), "attribute Net.array: "),
    "dataclass": (lambda net: setattr(net.settings, "scale", 2.0), "attribute Net.settings.scale: 1.0 -> 2.0"),
    "namespace": (lambda net: setattr(net.settings.inner, "shift", 2.0), "Net.settings.inner['shift']: 0.5 -> 2.0"),
    "list in a namespace": (lambda net: net.settings.inner.sizes.__setitem__(0, 9), "['sizes'][0]: 2 -> 9"),
    "argparse": (lambda net: setattr(net.namespace, "scale", 2.0), "attribute Net.namespace.scale: 1.0 -> 2.0"),
    "slot": (lambda net: setattr(net.slotted, "scale", 2.0), "attribute Net.slotted.scale: 1.0 -> 2.0"),
    "__getattr__": (lambda net: net.lookup._values.update(scale=2.0), "Net.lookup._values['scale']: 1.0 -> 2.0"),
    "callable object": (lambda net: setattr(net.call, "factor", 2.0), "attribute Net.call.factor: 1.0 -> 2.0"),
    "partial": (lambda net: net.partial.keywords.update(y=4.0), "Net.partial.keywords['y']: 1.0 -> 4.0"),
    "property": (lambda net: setattr(net, "_hidden", 2.0), "attribute Net._hidden: 1.0 -> 2.0"),
    "another class": (_another_class, "class of Net: Net -> Other"),
    "class attribute": (lambda net: setattr(type(net).__mro__[1], "by_class", 2.0), "Own.by_class: 1.0 -> 2.0"),
    "subclass attribute": (lambda net: setattr(type(net), "by_class", 2.0), "attribute Net.by_class was added"),
    "method of the class": (lambda net: setattr(type(net), "factor", lambda _: 2.0), "attribute Net.factor was added"),
    "dict of the class": (lambda net: setattr(net, "table", {"scale": 2.0}), "attribute Net.table was added"),
    "shadowed class attribute": (lambda net: setattr(net, "by_class", 2.0), "attribute Net.by_class was added"),
    "method of an instance": (lambda net: setattr(net, "factor", lambda: 2.0), "attribute Net.factor was added"),
    "forward of a submodule": (
        lambda net: setattr(net.norm, "forward", MethodType(_forward, net.norm)), "attribute norm.forward was added"
    ),
    "attribute that was not there": (lambda net: setattr(net, "extra", 2.0), "attribute Net.extra was added"),
    "tensor": (lambda net: setattr(net, "mask", torch.zeros(8)), "attribute Net.mask: a Tensor -> a Tensor"),
    "object": (lambda net: setattr(net, "settings", Settings(2.0)), "attribute Net.settings: a Settings -> a Settings"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed_and_its_cause_logged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    net = made()
    step = cf.compile(net, loss_fn=F.mse_loss)
    change, cause = CHANGES[name]
    ((x, y),) = values()
    step(x, y)
    with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
        change(net)
        torch.testing.assert_close(step(x, y), F.mse_loss(net(x), y).detach())
        torch.testing.assert_close(step(x, y), F.mse_loss(net(x), y).detach())
        said = retraced(caplog)
        assert len(said) == (cause != "") and all(cause in each for each in said), said


def test_unread_or_equal_values_trace_nothing_again(caplog: pytest.LogCaptureFixture) -> None:
    net = made()
    step = cf.compile(net, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    ((x, y),) = values()
    with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
        for number in range(4):
            step(x, y)
            net.unread = net.norm.note = float(number)  # type: ignore[assignment]
            net.scale = float("1.0")
            net.sizes = [1, float("2")]
            net.settings.scale = float("1")
            net.state_dict()
    assert retraced(caplog) == []
    assert not _originals, "classes are left as they were"
    assert "__getattribute__" not in vars(nn.Module)


def test_a_value_that_comes_back_finds_its_graph(caplog: pytest.LogCaptureFixture) -> None:
    net = made()
    step = cf.compile(net, loss_fn=F.mse_loss)
    ((x, y),) = values()
    with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
        for number in range(6):
            net.drop.p = float(number % 2)
            torch.testing.assert_close(step(x, y), F.mse_loss(net(x), y).detach())
    assert retraced(caplog) == ["re-tracing: attribute drop.p: 0.0 -> 1.0"]


@pytest.mark.parametrize("options", [{}, {"parallel_mode": "semi_auto", "mesh": (2, 1)}], ids=["data", "semi_auto"])
def test_all_ranks_of_a_virtual_world(options: dict[str, Any]) -> None:
    net = made().double()
    reference = copy.deepcopy(net)
    optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, reference))
    world = LockstepWorld(cf.compile(net, loss_fn=F.mse_loss, optimizer=optimizer, device_num=2, **options))
    for number, (x, y) in enumerate(values(3)):
        batch = x.double(), y.double()
        for each in (*world.models, reference):
            each.scale = 1.0 + number  # type: ignore[assignment]
        world(shards(batch, 2))
        plain.zero_grad()
        F.mse_loss(reference(batch[0]), batch[1]).backward()
        plain.step()
    for mine, other in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


_FACTOR = 1.0


def test_retrace_takes_up_what_nobody_can_see(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    step = cf.compile(net, loss_fn=lambda o, t: F.mse_loss(o, t) * _FACTOR, optimizer=optimizer)
    step.retrace()
    ((x, y),) = values()
    with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
        step(x, y)
        assert retraced(caplog) == []
        monkeypatch.setattr(f"{__name__}._FACTOR", 2.0)
        before = {name: held.clone() for name, held in net.state_dict().items()}
        step.retrace()
        torch.testing.assert_close(net.state_dict(), before)
        torch.testing.assert_close(step(x, y), 2 * F.mse_loss(F.linear(x, before["weight"], before["bias"]), y))
    assert retraced(caplog) == ["re-tracing: step.retrace() was called"]
    assert optimizer.state[net.weight]["step"] == 2
