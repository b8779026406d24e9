"""What a loss function is made of may change between steps."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from tests.frontends.changing_models import Settings, retraced, values


@pytest.fixture(autouse=True)
def _unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are not what is tested here: leave out their verification, which takes most of the time."""
    monkeypatch.setenv("COMMFUSE_VERIFY", "0")


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
    step = cf.compile(net, loss_fn=loss_fn, form="step")
    ((x, y),) = values()
    first = step(x, y)
    change(loss_fn)
    with caplog.at_level(logging.INFO, logger="commfuse_fx.retrace"):
        second = step(x, y)
    (said,) = retraced(caplog)
    assert cause in said, said
    torch.testing.assert_close(second, loss_fn(net(x), y).detach())
    assert name == "mode" or not torch.equal(first, second)
