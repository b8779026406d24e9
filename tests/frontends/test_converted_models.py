"""A model that is converted between steps: what a graph was traced for includes how its parameters lie."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import commfuse_fx as cf


def weighted_sum(output: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (output * weights).sum()


@pytest.mark.parametrize("momentum", [None, 0.0, 0.9])
def test_memory_format(momentum: float | None) -> None:
    """Momentum None: no optimizer."""
    norm = nn.Sequential(nn.GroupNorm(4, 8), nn.ReLU6(), nn.Flatten(2))
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm, nn.Linear(64, 5))
    eager = copy.deepcopy(model)
    x, weights = torch.randn(2, 3, 8, 8), torch.randn(2, 8, 5)
    mine, other = (
        None if momentum is None else torch.optim.SGD(each.parameters(), 1e-3, momentum=momentum)
        for each in (model, eager)
    )
    step = cf.compile(model, loss_fn=weighted_sum, optimizer=mine)
    plain, last = torch.contiguous_format, torch.channels_last
    for layout in (plain, last, last, plain, last):
        model.to(memory_format=layout)  # type: ignore[call-overload]
        model.zero_grad()
        eager.zero_grad()
        step(x, weights)
        weighted_sum(eager(x), weights).backward()  # type: ignore[no-untyped-call]
        if other is not None:
            other.step()
        for param, want in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(param, want, rtol=1e-4, atol=1e-5)
            if other is None:
                torch.testing.assert_close(param.grad, want.grad, rtol=1e-4, atol=1e-4)
    assert len(step.planner.plans) == 2


@pytest.mark.parametrize("momentum", [None, 0.0, 0.9])
def test_dtype_where_inputs_keep_theirs(momentum: float | None) -> None:
    """Sizes at which parameters lie at the same places of flat storage, whatever their dtype."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 32), nn.Flatten(), nn.Linear(128, 32))
    eager = copy.deepcopy(model)
    x, y = torch.randint(0, 16, (4, 4)), torch.randint(0, 32, (4,))
    mine = None if momentum is None else torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)
    step = cf.compile(model, loss_fn=nn.functional.cross_entropy, optimizer=mine)
    velocity = [torch.zeros_like(param) for param in eager.parameters()]
    for dtype in (torch.float32, torch.float64, torch.float32):
        model.to(dtype)
        eager.to(dtype)
        model.zero_grad()
        eager.zero_grad()
        loss = step(x, y)
        assert loss.dtype == dtype
        nn.functional.cross_entropy(eager(x), y).backward()  # type: ignore[no-untyped-call]
        for number, (param, want) in enumerate(zip(model.parameters(), eager.parameters(), strict=True)):
            if momentum is None:
                torch.testing.assert_close(param.grad, want.grad)
                continue
            assert want.grad is not None
            velocity[number] = velocity[number].to(dtype) * momentum + want.grad
            with torch.no_grad():
                want -= 0.1 * velocity[number]
            torch.testing.assert_close(param, want)
