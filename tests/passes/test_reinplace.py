"""In-place rewriting never overwrites what somebody still needs."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.passes.fuse.reinplace import _IN_PLACE


class Body(nn.Module):
    def __init__(self, body: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x, self.w)


def kept_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    row = y[0]
    z = y * 2
    return (z.sum() + row.sum()) * 1.0


def both_operands(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return (y + y).sum()


def through_views(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).view(2, 8)
    z = y.view(4, 4) * 3
    return (z * z.t()).sum()


def parts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    a, b = (x @ w).chunk(2)
    return (a * 2 + torch.tanh(b)).sum() + b.mul(a).sum()


def expanded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).sum(0, keepdim=True).expand(4, 4)
    return (y * 2 + 1).pow(2).sum()


def inputs_stay(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x + 1) * (w + 1)).relu().sum() + (x * 2).sum()


@pytest.mark.parametrize("body", [kept_view, both_operands, through_views, parts, expanded, inputs_stay])
def test_results_equal_eager(body: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    model = Body(body)
    twin = copy.deepcopy(model)
    x = torch.randn(4, 4, dtype=torch.float64)
    given = x.clone()
    loss = cf.compile(model, form="step")(x)
    expected = twin(x)
    expected.backward()
    assert torch.equal(x, given)
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(model.w.grad, twin.w.grad, rtol=0, atol=1e-13)


def test_ops_are_rewritten_where_that_is_safe() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 4))
    step = cf.compile(model, loss_fn=nn.functional.mse_loss, device_num=1)
    text = step.lower(torch.ones(2, 4), torch.ones(2, 4)).text()
    assert "aten.relu_(" in text
    assert "aten.bernoulli_" in text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_in_place_variants_round_as_the_ops_do(dtype: torch.dtype) -> None:
    x, y = torch.rand(37).add(0.5).to(dtype), torch.rand(37).add(0.5).to(dtype)
    for name in ("add", "sub", "mul", "div"):
        for overload, other in (("Tensor", y), ("Scalar", 1 / 3)):
            op = getattr(getattr(torch.ops.aten, name), overload)
            if op in _IN_PLACE:
                assert torch.equal(_IN_PLACE[op](x.clone(), other), op(x, other)), op
