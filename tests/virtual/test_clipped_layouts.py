"""Gradients that are clipped lie where their buckets put them, in the memory order of their parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf

STEPS, LIMIT = 3, 0.05


class Turned(nn.Module):
    """Parameters whose elements lie in other orders, with gaps, or in the memory of others."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        randn = partial(torch.randn, generator=made, dtype=torch.float64)
        self.turned = nn.Parameter(randn(12, 24).t())
        self.permuted = nn.Parameter(randn(6, 2, 12).permute(2, 0, 1))
        self.strided = nn.Parameter(randn(12, 48)[:, ::2])
        self.piece = nn.Parameter(randn(24, 12).chunk(2, 0)[1])
        self.kernel = nn.Parameter(randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
        self.plain = nn.Parameter(randn(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(torch.tanh(x @ self.strided) @ self.turned) @ self.permuted.flatten(1)
        maps = nn.functional.conv2d(x.view(-1, 3, 2, 2), self.kernel)
        return torch.tanh(hidden @ self.piece + self.plain) + maps.mean((1, 2, 3)).unsqueeze(1)


def each_alone(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [param]} for param in model.parameters()], lr=0.01)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "rmsprop": lambda model: torch.optim.RMSprop([model.turned, model.piece], lr=0.01),
    "adamw, each alone": each_alone,
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
}
MODES: dict[str, dict[str, Any]] = {
    "semi_auto": {"parallel_mode": "semi_auto", "mesh": (2, 2), "device_num": 4},
    "in small buckets": {
        "parallel_mode": "semi_auto",
        "device_num": 2,
        "comm_fusion": {"allreduce": {"mode": "size", "config": 1}},
    },
    "auto": {"parallel_mode": "auto", "device_num": 2},
    "data_parallel": {"device_num": 2, "full_batch": True},
    "rows": {
        "device_num": 2,
        "enable_parallel_optimizer": True,
        "parallel_optimizer_config": {"parallel_optimizer_threshold": 0, "pad": True},
    },
}


@pytest.mark.parametrize("clip", [LIMIT, None], ids=["clipped", "whole"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_are_those_of_one_device(
    kind: str, mode: str, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMFUSE_VERIFY", "1")  # each pass says what its nodes make
    loss_fn, make = nn.functional.mse_loss, OPTIMIZERS[kind]
    batches = [torch.randn(8, 12, dtype=torch.float64) for _ in range(STEPS)]
    model = Turned()
    options = {"full_batch": True, **MODES[mode], "clip_grad_norm": clip}
    low = cf.compile(model, loss_fn=loss_fn, optimizer=make(model), **options).lower(batches[0], batches[0])
    world = cf.lockstep(low)
    single = Turned()
    optimizer = make(single)
    for x in batches:
        result = world(x, x)
        optimizer.zero_grad()
        loss_fn(single(x), x).backward()
        if clip is not None:
            held = [param for group in optimizer.param_groups for param in group["params"]]
            torch.nn.utils.clip_grad_norm_(held, clip)
        optimizer.step()
        parameters = result.parameters()
        for name, param in single.named_parameters():
            torch.testing.assert_close(parameters[name], param.detach(), rtol=1e-9, atol=1e-12, msg=name)
