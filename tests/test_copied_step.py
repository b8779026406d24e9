"""A step that is copied with its model, as part of a trainer, say."""

from __future__ import annotations

import copy

import torch
from torch import nn

import commfuse_fx as cf


def test_a_copy_of_a_used_step_trains_its_own_model() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = cf.compile(model, loss_fn=nn.functional.mse_loss, optimizer=optimizer)
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    step(x, y)
    before = model.weight.detach().clone()
    other = copy.deepcopy(step)
    other(x, y)
    assert torch.equal(model.weight, before)
    step(x, y)
    assert not torch.equal(model.weight, before)
    assert torch.equal(model.weight, other.model.weight)
