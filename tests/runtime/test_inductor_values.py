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


class Attends(nn.Module):
    """Attention with keys that are permuted right into the shape that their product needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x).view(2, 4, 4, 4) for linear in self.linears)
        weights = torch.softmax(q.permute(0, 2, 1, 3) @ k.permute(0, 2, 3, 1) * 0.5, -1)
        return (weights @ v.permute(0, 2, 1, 3)).tanh().sum()


def test_what_looks_like_attention_is_computed_as_it_stands() -> None:
    """With as many heads as places Inductor took one for the other, where nobody keeps the weights for a backward."""
    model = Attends().double().eval()
    x = torch.randn(2, 4, 16).double()
    with torch.no_grad():
        torch.testing.assert_close(cf.compile(model, form="step", backend="inductor")(x), model(x))
