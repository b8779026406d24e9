"""Gradients that are summed and then gathered, in steps whose communication runs on into the next one."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.oracle import ACROSS_STEPS


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
        self.head = nn.Linear(8, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.stack((x, torch.tanh(x)), 1)
        return self.head(x + self.attention(rows, rows, rows, need_weights=False)[0][:, 0])


def _sgd(model: Attention) -> torch.optim.Optimizer:
    """Over all but the weights of the attention, one of which is divided."""
    return torch.optim.SGD([*model.head.parameters(), model.attention.in_proj_bias, model.attention.out_proj.bias], 0.1)


def test_a_bucket_whose_part_is_gathered_is_not_left_to_the_next_step() -> None:
    model = Attention()
    eager = copy.deepcopy(model)
    reference = _sgd(eager)
    cf.shard(model, "attention.out_proj.weight", (None, "tp"))
    options = {**ACROSS_STEPS, "parallel_mode": "semi_auto", "mesh": (2, 2), "device_num": 4, "full_batch": True}
    world = LockstepWorld(cf.compile(model, loss_fn=F.mse_loss, optimizer=_sgd(model), global_rank=0, **options))
    for _ in range(3):
        x, y = torch.randn(24, 8, dtype=torch.float64), torch.randn(24, 3, dtype=torch.float64)
        reference.zero_grad()
        F.mse_loss(eager(x), y).backward()
        reference.step()
        world([(x, y)] * 4)
    for each in world.models:
        torch.testing.assert_close(dict(each.named_parameters()), dict(eager.named_parameters()))
