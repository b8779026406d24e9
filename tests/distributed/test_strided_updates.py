"""On real ranks: updates of parameters with gaps and of other strides, and plans whose strides change."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import commfuse_fx as cf
from tests.distributed.harness import Ranks
from tests.oracle import ACROSS_STEPS, OPTIMAL, SLOW


class Chunk(nn.Module):
    """Half of a tensor is trained, the other half is a buffer; a column-major weight goes with it."""

    def __init__(self, base: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(base.chunk(2, 1)[0])
        self.register_buffer("other", base.chunk(2, 1)[1])
        self.linear = nn.Linear(8, 4)
        self.linear.weight.data = self.linear.weight.data.t().contiguous().t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(torch.tanh(x @ self.weight).repeat(1, 2)) - 0.2).square().mean()


def made() -> Chunk:
    torch.manual_seed(0)
    return Chunk(torch.randn(8, 8))


def follow_eager() -> None:
    across: dict[str, Any] = {"comm_fusion": OPTIMAL, "cluster": SLOW}
    semi: dict[str, Any] = {"parallel_mode": "semi_auto", "full_batch": True}
    for options in ({}, {**across, "schedule": ACROSS_STEPS["schedule"]}, semi):
        for kind, settings in ((torch.optim.AdamW, {"lr": 1e-2}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})):
            model, reference = made(), made()
            if "parallel_mode" in options:
                cf.shard(model.linear, weight=(None, "dp"))
            optimizer, eager = kind(model.parameters(), **settings), kind(reference.parameters(), **settings)
            step = cf.compile(model, optimizer=optimizer, **options)
            buffer = model.other.clone()
            for number in range(4):
                if number == 2:  # other strides
                    for each in (model, reference):
                        each.linear.weight.data = each.linear.weight.data.contiguous()
                        each.weight.data = copy.deepcopy(each.weight.data[:, [3, 2, 1, 0]])
                x = torch.randn(6, 8, generator=torch.Generator().manual_seed(number))
                eager.zero_grad()
                reference(x).backward()
                eager.step()
                step(x)
            torch.testing.assert_close(dict(model.named_parameters()), dict(reference.named_parameters()))
            assert torch.equal(model.other, buffer)


def test_updates_follow_eager(ranks: Ranks) -> None:
    ranks.values(follow_eager)
