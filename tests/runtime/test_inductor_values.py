"""Values that Inductor by itself would compute otherwise than eager PyTorch (torch 2.13)."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf


class Resampled(nn.Module):
    """Windows over the border, sizes that stay, floors of quotients, and a diagonal of expanded rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 2, 8, 9))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = (x * self.weight).tanh()
        pooled = F.avg_pool2d(x, 3, 2, ceil_mode=True), F.avg_pool3d(x, 2, 2, 1, ceil_mode=True)
        larger = F.interpolate(x, scale_factor=1.7), F.interpolate(x, scale_factor=(1.1, 1.5))
        steps = (x * 10).round().div(10).div(0.1, rounding_mode="floor")
        rows = torch.diagonal_scatter(x[:, :, :1].expand(1, 2, 8, 9), x[..., 0], 0, 2, 3)
        return (*pooled, *larger, steps * x, rows * 2)


def test_what_inductor_computes_otherwise_has_values_and_gradients_of_eager_pytorch() -> None:
    torch.manual_seed(0)
    model = Resampled().double()
    twin = copy.deepcopy(model)
    x = torch.randn(1, 2, 8, 9).double()
    outputs = cf.compile(model, backend="inductor")(x), twin(x)
    for have, want in zip(*outputs, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-10)
        for result in (have, want):
            result.backward(torch.linspace(-1, 1, want.numel()).double().view(want.shape), retain_graph=True)
        torch.testing.assert_close(model.weight.grad, twin.weight.grad, rtol=1e-10, atol=1e-10)


def test_in_half_precision_a_maximum_equals_its_element() -> None:
    """Inductor compares what it has not rounded with what it has."""
    model = nn.Sequential(nn.Linear(6, 37), IsLargest()).bfloat16()
    found = cf.compile(model, backend="inductor")(torch.randn(5, 6).bfloat16())
    assert (found.sum(1) >= 1).all()


class IsLargest(nn.Module):
    """1 where a row has its maximum, 0 elsewhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x / 3
        return (x == x.amax(1, True)).to(x.dtype) + 0 * x
