"""Modules that the forward makes: a slice of a ModuleList is a new one."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import commfuse_fx as cf

_left_behind: list[nn.Module] = []


def _slice(net: Net, x: torch.Tensor) -> torch.Tensor:
    for layer in net.layers[: net.used]:
        x = layer(x)
    return x


def _slice_in_a_cycle(net: Net, x: torch.Tensor) -> torch.Tensor:
    used = net.layers[: net.used]
    used.itself = [used]
    for layer in used:
        x = layer(x)
    return x


def _sequential(net: Net, x: torch.Tensor) -> torch.Tensor:
    return nn.Sequential(*net.layers, nn.Tanh())(x)


def _module_dict(net: Net, x: torch.Tensor) -> torch.Tensor:
    return nn.ModuleDict({"first": net.layers[0]})["first"](x)


def _kept_in_a_global(net: Net, x: torch.Tensor) -> torch.Tensor:
    _left_behind.append(net.layers[1:])
    return _left_behind[-1][0](x)  # type: ignore[index]


def _kept_in_a_list(net: Net, x: torch.Tensor) -> torch.Tensor:
    if not net.kept:
        net.kept.append(nn.Sequential(*net.layers))
    return net.kept[0](x)  # type: ignore[no-any-return]


WAYS = [_slice, _slice_in_a_cycle, _sequential, _module_dict, _kept_in_a_global, _kept_in_a_list]


class Net(nn.Module):
    def __init__(self, way: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.used = 2
        self.way = way
        self.kept: list[nn.Module] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(self, x)


@pytest.mark.parametrize("way", WAYS)
def test_making_a_module_is_no_change_of_the_model(
    way: Callable[[Net, torch.Tensor], torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    net = Net(way)
    eager = copy.deepcopy(net)
    step = cf.compile(net, loss_fn=F.mse_loss)
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            torch.testing.assert_close(step(x, y), F.mse_loss(eager(x), y).detach())
        assert "_modules" not in caplog.text and "re-tracing" not in caplog.text
        if way is _slice:
            net.used = eager.used = 3
            torch.testing.assert_close(step(x, y), F.mse_loss(eager(x), y).detach())
            assert "Net.used: 2 -> 3" in caplog.text


def test_a_kept_module_is_still_looked_at() -> None:
    net = Net(_kept_in_a_list)
    step = cf.compile(net, loss_fn=F.mse_loss)
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    step(x, y)
    del net.kept[0][2]  # type: ignore[union-attr]
    torch.testing.assert_close(step(x, y), F.mse_loss(net(x), y).detach())
