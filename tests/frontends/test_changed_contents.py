"""Values of tensors, and modules in plain lists, may change between steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from tests.frontends.changing_models import doubled, retraced, values


@pytest.fixture(autouse=True)
def _unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are not what is tested here: leave out their verification, which takes most of the time."""
    monkeypatch.setenv("COMMFUSE_VERIFY", "0")


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
        lambda: Fn(_through, plain=[nn.Hardtanh()]), lambda net: net.plain[0].register_forward_hook(doubled),
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
