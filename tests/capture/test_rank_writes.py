"""Parameters that become another one on every rank are warned of."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

import commfuse_fx as cf


class Centre(nn.Module):
    """Follows the mean of a layer, as the codebook of a quantizer does."""

    def __init__(self, mean: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.centre = nn.Parameter(torch.zeros(4), requires_grad=False)
        self._mean = mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.centre.lerp_(self._mean(y.detach()), 0.1)
        return (y - self.centre).square().mean()


def own(y: torch.Tensor) -> torch.Tensor:
    return y.mean(0)


def noise(y: torch.Tensor) -> torch.Tensor:
    return torch.randn(4)


def reduced(y: torch.Tensor) -> torch.Tensor:
    return cf.ops.all_reduce(y.mean(0), op="avg")


def gathered(y: torch.Tensor) -> torch.Tensor:
    return cf.ops.all_gather(y).mean(0)


def constant(y: torch.Tensor) -> torch.Tensor:
    return torch.ones(4)


@pytest.mark.parametrize(
    ("mean", "differs"), [(own, True), (noise, True), (reduced, False), (gathered, False), (constant, False)]
)
def test_what_follows_from_a_ranks_batch(
    mean: Callable[[torch.Tensor], torch.Tensor], differs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Centre(mean)
    optimizer = torch.optim.SGD([*model.layer.parameters()], lr=0.1)
    with caplog.at_level(logging.WARNING, "commfuse_fx"):
        lowered = cf.compile(model, optimizer=optimizer, device_num=2).lower(torch.randn(4, 4))
    assert ("parameter centre" in caplog.text and "all_reduce" in caplog.text) == differs
    result = cf.lockstep(lowered)(torch.randn(8, 4))
    assert (result.disagreement is not None and result.disagreement.node == "update/centre") == differs
