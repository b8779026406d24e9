"""Loss scaling, autocast and models in low precision give with a compiled module what they give with DDP."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import commfuse_fx as cf
from tests.distributed.harness import Ranks
from tests.distributed.loops_of_modules import assert_as_ddp, batch, grads

pytestmark = pytest.mark.dist


def pair(model: nn.Module) -> list[tuple[Any, nn.Module]]:
    twin = copy.deepcopy(model)
    return [(cf.compile(model, cpu_kernels=False), model), (nn.parallel.DistributedDataParallel(twin), twin)]


def scaled_losses() -> None:
    """An infinity on one rank: all skip the step, and scale down."""
    torch.manual_seed(0)
    found = []
    for call, model in pair(nn.Linear(6, 6)):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler, seen = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2), []
        for step in range(4):
            x = batch(step, dtype=torch.float32)
            if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
                x = x * float("inf")
            optimizer.zero_grad()
            scaler.scale(call(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            seen.append((scaler.get_scale(), [param.detach().clone() for param in model.parameters()]))
        assert seen[2][0] < seen[1][0] and torch.equal(seen[2][1][0], seen[1][1][0])
        found.append(seen)
    assert_as_ddp(*found, tolerance=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_infinity_on_one_rank_is_skipped_by_all(ranks: Ranks, size: int) -> None:
    ranks.values(scaled_losses, size=size)


class Rounds(nn.Module):
    """A gradient of a parameter is rounded to bf16 on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(6, 6), nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) + self.bias.bfloat16()
        return out


class ComputesInFloat32(nn.Module):
    """Under autocast a part of it is in float32, and so is the gradient of that part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.first(x)[None]
        attended = F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.25)  # in float32, below autocast
        with torch.autocast("cpu", enabled=False):
            out: torch.Tensor = self.last(attended[0].float())
        return out


def low_precision() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 6))
    cases: list[tuple[nn.Module, torch.dtype | None, torch.dtype]] = [
        (copy.deepcopy(layers), torch.bfloat16, torch.float32),
        (copy.deepcopy(layers), torch.float16, torch.float32),
        (copy.deepcopy(layers).bfloat16(), None, torch.bfloat16),
        (Rounds(), None, torch.float32),
        (ComputesInFloat32(), torch.bfloat16, torch.float32),
    ]
    for model, autocast, dtype in cases:
        found = []
        for call, net in pair(model):
            torch.manual_seed(3 + dist.get_rank())
            with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                out = call(batch(0, dtype=dtype))
            out.float().square().mean().backward()
            found.append((out.dtype, out.detach(), grads(net)))
        assert found[0][0] == found[1][0]
        assert_as_ddp(found[0][1:], found[1][1:], 1e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_autocast_and_models_in_low_precision(ranks: Ranks, size: int) -> None:
    ranks.values(low_precision, size=size)
