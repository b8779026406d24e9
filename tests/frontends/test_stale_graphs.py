"""Whatever Python value a trace has read may change between steps: the step then runs what eager execution would."""

from __future__ import annotations

import argparse
import copy
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.capture.noted_classes import _originals
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.models import shards


@pytest.fixture(autouse=True)
def _unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are not what is tested here: leave out their verification, which takes most of the time."""
    monkeypatch.setenv("COMMFUSE_VERIFY", "0")


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


def retraced(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "commfuse_fx.retrace" and each.levelno == 20]


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


class Weighted(nn.Module):
    """A loss with a tensor, numbers and a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.SmoothL1Loss(beta=1.0)
        self.register_buffer("weight", torch.ones(4))
        self.drop = nn.Dropout(0.5)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.inner(output * self.weight, target) + 0 * self.drop(output).sum()


class Loss:
    def __init__(self) -> None:
        self.settings = Settings()

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target) * self.settings.scale

    def method(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self(output, target)


def _scaled(output: torch.Tensor, target: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return F.mse_loss(output, target) * scale


def _closure(settings: Settings) -> Any:
    return lambda output, target: F.mse_loss(output, target) * settings.scale


def _cell() -> tuple[Any, Callable[[], None]]:
    scale = 1.0

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target) * scale

    def change() -> None:
        nonlocal scale
        scale = 2.0

    return loss, change


_SETTINGS, _CELL, _DRAWN = Settings(), _cell(), Weighted()
LOSSES: dict[str, tuple[Any, Callable[[Any], Any], str]] = {
    "module": (nn.SmoothL1Loss(beta=1.0), lambda loss: setattr(loss, "beta", 0.1), "loss_fn.beta: 1.0 -> 0.1"),
    "part": (Weighted(), lambda loss: setattr(loss.inner, "beta", 0.1), "attribute loss_fn.inner.beta: 1.0 -> 0.1"),
    "buffer": (Weighted(), lambda loss: setattr(loss, "weight", torch.zeros(4)), "attribute loss_fn._buffers"),
    "reduction": (nn.MSELoss(), lambda loss: setattr(loss, "reduction", "sum"), "loss_fn.reduction: 'mean' -> 'sum'"),
    "mode": (Weighted(), lambda loss: loss.eval(), "attribute loss_fn.drop.training: True -> False"),
    "hook": (
        Weighted(), lambda loss: loss.inner.register_forward_hook(lambda m, i, o: o * 2), "loss_fn.inner._forward_hooks"
    ),
    "partial": (functools.partial(_scaled, scale=1.0), lambda loss: loss.keywords.update(scale=2.0),
                "loss_fn.keywords['scale']: 1.0 -> 2.0"),
    "callable": (Loss(), lambda loss: setattr(loss.settings, "scale", 2.0), "loss_fn.settings.scale: 1.0 -> 2.0"),
    "method": (Loss().method, lambda loss: setattr(loss.__self__.settings, "scale", 2.0), ".scale: 1.0 -> 2.0"),
    "closure": (_closure(_SETTINGS), lambda loss: setattr(_SETTINGS, "scale", 2.0), "settings.scale: 1.0 -> 2.0"),
    "nonlocal": (_CELL[0], lambda loss: _CELL[1](), "variable loss_fn: scale: 1.0 -> 2.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_change_of_the_loss_is_noticed(name: str, caplog: pytest.LogCaptureFixture) -> None:
    loss_fn, change, cause = LOSSES[name]
    net = nn.Linear(8, 4)
    step = cf.compile(net, loss_fn=loss_fn)
    ((x, y),) = values()
    first = step(x, y)
    change(loss_fn)
    with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
        second = step(x, y)
    (said,) = retraced(caplog)
    assert cause in said, said
    torch.testing.assert_close(second, loss_fn(net(x), y).detach())
    assert name == "mode" or not torch.equal(first, second)


def _double(*values: Any) -> Any:
    return values[-1] * 2


def _double_input(module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (inputs[0] * 2,)


def _double_gradients(module: nn.Module, *grads: Any) -> Any:
    return tuple(None if grad is None else grad * 2 for grad in grads[0])


HOOKS: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "forward": (lambda net: net[0].register_forward_hook(_double), "of module 0 (forward, _double) was added"),
    "forward_pre": (lambda net: net[1].register_forward_pre_hook(_double_input), "of module 1 (forward_pre, "),
    "full_backward": (lambda net: net[0].register_full_backward_hook(_double_gradients), "of module 0 (backward, "),
    "full_backward_pre": (
        lambda net: net[2].register_full_backward_pre_hook(_double_gradients), "of module 2 (backward_pre, "
    ),
    "with_kwargs": (
        lambda net: net[0].register_forward_hook(lambda m, i, k, o: o * 2, with_kwargs=True), "of module 0 (forward, "
    ),
    "parameter": (lambda net: net[0].weight.register_hook(_double), "of parameter 0.weight (backward, _double)"),
    "global": (lambda net: nn.modules.module.register_module_forward_hook(_double), "of all modules (forward, "),
    "root": (lambda net: net.register_forward_hook(_double), "of module Sequential (forward, "),
}  # fmt: skip


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_come_and_go(name: str, caplog: pytest.LogCaptureFixture) -> None:
    add, cause = HOOKS[name]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    reference = copy.deepcopy(net)
    step = cf.compile(net, loss_fn=F.mse_loss)

    def same() -> None:
        ((x, y),) = values()
        net.zero_grad(), reference.zero_grad()
        loss, want = step(x, y), F.mse_loss(reference(x), y)
        want.backward()
        torch.testing.assert_close(loss, want.detach())
        for mine, other in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)

    same()
    with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
        handles = [add(net), add(reference)] if name != "global" else [add(net)]
        same()
        for handle in handles:
            handle.remove()
        same()
    (said,) = retraced(caplog)
    assert cause in said, said


def test_a_post_accumulate_grad_hook_added_later_is_refused() -> None:
    net = nn.Linear(8, 4)
    step = cf.compile(net, loss_fn=F.mse_loss)
    ((x, y),) = values()
    step(x, y)
    net.weight.register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(cf.CaptureError, match="post-accumulate-grad hook"):
        step(x, y)


def test_state_of_a_hook_is_noticed() -> None:
    net, hook = nn.Sequential(nn.Linear(8, 4)), Scale()
    net[0].register_forward_hook(hook)
    step = cf.compile(net, loss_fn=F.mse_loss)
    ((x, y),) = values()
    for factor in (1.0, 2.0):
        hook.factor = factor
        torch.testing.assert_close(step(x, y), F.mse_loss(net(x), y).detach())


def test_modes_of_submodules_and_requires_grad(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(1.0), nn.Linear(8, 4))
    step = cf.compile(net, loss_fn=F.mse_loss)
    ((x, y),) = values()
    step(x, y)
    with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
        net[1].eval()
        torch.testing.assert_close(step(x, y), F.mse_loss(net(x), y).detach())
        net[0].weight.requires_grad_(False)
        step(x, y)
    causes = ["mode of module 1: train -> eval", "requires_grad of parameter 0.weight: True -> False"]
    assert retraced(caplog) == [f"re-tracing: {cause}" for cause in causes]


class Fn(nn.Module):
    def __init__(self, run: Callable[[Any, torch.Tensor], torch.Tensor], **parts: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 4)
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def _through(m: Any, x: torch.Tensor) -> torch.Tensor:
    for each in m.plain:
        x = each(x)
    return m.lin(x)


OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any], str]] = {
    "value of a tensor": (
        lambda: Fn(lambda m, x: m.lin(x) * m.t.item(), t=torch.tensor(2.0)), lambda net: net.t.fill_(3.0),
        "values of Fn.t: 2.0 -> 3.0",
    ),
    "list of values": (
        lambda: Fn(lambda m, x: m.lin(x) * m.t.tolist()[0], t=torch.ones(2)), lambda net: net.t.mul_(2),
        "values of Fn.t: [1.0, 1.0] -> [2.0, 2.0]",
    ),
    "decision on a tensor": (
        lambda: Fn(lambda m, x: m.lin(x) * (2 if m.t else 1), t=torch.tensor(True)), lambda net: net.t.fill_(False),
        "values of Fn.t: True -> False",
    ),
    "tensor in the graph": (
        lambda: Fn(lambda m, x: m.lin(x) * m.t, t=torch.tensor(2.0)), lambda net: net.t.fill_(3.0), ""
    ),
    "module in a list": (
        lambda: Fn(_through, plain=[nn.Hardtanh()]), lambda net: setattr(net.plain[0], "max_val", 0.1),
        "attribute Fn.plain[0].max_val: 1.0 -> 0.1",
    ),
    "hook of a module in a list": (
        lambda: Fn(_through, plain=[nn.Hardtanh()]), lambda net: net.plain[0].register_forward_hook(_double),
        "attribute Fn.plain[0]._forward_hooks",
    ),
    "module added to a list": (
        lambda: Fn(_through, plain=[nn.Hardtanh()]), lambda net: net.plain.append(nn.Tanh()), "attribute Fn.plain"
    ),
    "vars": (
        lambda: Fn(lambda m, x: m.lin(x) * vars(m)["k"], k=1.0), lambda net: setattr(net, "k", 2.0), "Fn.k: 1.0 -> 2.0"
    ),
    "LSTM": (lambda: Fn(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(8, 4)), lambda net: None, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_values_of_tensors_and_modules_in_plain_lists(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Eager calls in between, which set the references of an LSTM anew, trace nothing again."""
    make, change, cause = OTHERS[name]
    torch.manual_seed(0)
    net = make()
    step = cf.compile(net, loss_fn=F.mse_loss)
    ((x, y),) = values()
    with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
        for number in range(4):
            if number == 2:
                change(net)
            torch.testing.assert_close(step(x, y), F.mse_loss(net(x), y).detach())
    said = retraced(caplog)
    assert len(said) == (cause != "") and all(cause in each for each in said), said


class Counting(nn.Module):
    """Changes its own attributes in several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 4)
        self.way, self.calls, self.counts, self.settings, self.seen = way, 0, {"calls": 0}, Settings(), [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "number":
            self.calls += 1
        elif self.way == "dict":
            self.counts["calls"] += 1
        elif self.way == "object":
            self.settings.scale += 1
        elif self.way == "list":
            self.seen.append(len(self.seen))
        elif self.way == "written first":
            self.rows = x.shape[0]
            return self.lin(x) * self.rows
        elif self.way == "cached":
            if not hasattr(self, "kept"):
                self.kept = 3.0
            return self.lin(x) * self.kept
        return self.lin(x)


OWN = {
    "number": "Counting.calls in forward (0 -> 1)",
    "dict": "Counting.counts['calls'] in forward (0 -> 1)",
    "object": "Counting.settings.scale in forward (1.0 -> 2.0)",
    "list": "Counting.seen in forward (list(0) -> list(0, 1))",
    "written first": "",
    "cached": "",
}


@pytest.mark.parametrize("way", OWN)
def test_what_a_forward_changes_itself_traces_nothing_again(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """Not even where two shapes take turns, of which each leaves another value; a warning tells of it once."""
    net = Counting(way)
    step = cf.compile(net, loss_fn=F.mse_loss)
    ((x, y),) = values()
    with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
        for rows in (6, 3, 6, 3, 6):
            torch.testing.assert_close(step(x[:rows], y[:rows]), F.mse_loss(net(x[:rows]), y[:rows]).detach())
            if way == "number":
                net.calls = 0
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warned) == (OWN[way] != "") and all(OWN[way] in each for each in warned), warned
    if way in ("number", "written first", "cached"):
        assert len(retraced(caplog)) == 1


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
