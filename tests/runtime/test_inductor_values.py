"""Values that Inductor by itself would compute otherwise than eager PyTorch (torch 2.13)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.runtime.execute.inductor.inductor import compiled_regions


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
        floors = (x.detach() * 10).round().div(10) // 0.1, (x.detach() * 10).round().div(10) // x.detach().abs()
        return (*pooled, *larger, steps * x, rows * 2, *(each * x for each in floors))


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


class FindsLargest(nn.Module):
    """Places of the largest and of the smallest element, where columns lie in memory as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.weight * (x.t() * 2).argmax(), self.weight * (x.t() + 1).argmin()


def test_places_in_permuted_rows_are_counted_in_their_order() -> None:
    torch.manual_seed(0)
    model = FindsLargest()
    compiled = cf.compile(model, backend="inductor")
    for _ in range(5):
        x = torch.randn(5, 3)
        torch.testing.assert_close(compiled(x), model(x))


class OfBytes(nn.Module):
    """The largest and smallest byte, whether there is any, and an image in other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = [(image + 1).max(), (image + 1).min(), (image + 1).any(), (image + 1).any(3)]
        sizes = [F.interpolate(image, scale_factor=1.5, mode=mode) for mode in ("bilinear", "bicubic")]
        return *(self.weight * each for each in (*found, *sizes)), (image + 1).any()


def test_bytes_are_those_of_pytorch() -> None:
    torch.manual_seed(0)
    model, image = OfBytes(), torch.randint(9, (2, 3, 7, 5)).to(torch.uint8)
    torch.testing.assert_close(cf.compile(model, backend="inductor")(image), model(image))


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


PLACES = torch.arange(2560).flip(0).view(1, 1, 40, 64)

SCATTERED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "index_fill": lambda x: torch.zeros_like(x).index_fill(0, PLACES[0, 0, :, 0] // 128, 1.0),
    "put": lambda x: torch.zeros_like(x).put(PLACES[0, 0], x),
    "max_unpool2d": lambda x: F.max_unpool2d(x.view(1, 1, 40, 64), PLACES, 1, 1),
    "col2im": lambda x: F.fold(x.t().reshape(1, 64, 40), (40, 64), (1, 64)),
    "max_pool2d": lambda x: torch.ops.aten.max_pool2d_with_indices_backward(
        *[x.view(1, 1, 40, 64)] * 2, [3, 3], [1, 1], [1, 1], [1, 1], False, PLACES
    ),
    "unfold": lambda x: torch.ops.aten.unfold_backward(x.view(10, 64, 4), [40, 64], 0, 4, 4),
}


class ReadsScattered(nn.Module):
    """What an op has scattered in one precision, read in another one beside layer norm of as many rows."""

    def __init__(self, scattered: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scattered, self.rows, self.norm = scattered, nn.Embedding(40, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        read = self.scattered(x).view(40, 64).double()
        return self.norm(self.rows(numbers)) * read, read


@pytest.mark.parametrize("name", SCATTERED)
def test_what_inductor_makes_a_scatter_of_is_complete_before_it_is_read(name: str) -> None:
    torch.manual_seed(0)
    model, x, numbers = ReadsScattered(SCATTERED[name]).double(), torch.randn(40, 64), torch.randint(40, (40,))
    found = cf.compile(model, backend="inductor")(x, numbers)
    torch.testing.assert_close(found, model(x, numbers), rtol=1e-10, atol=1e-10)


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


def test_no_kernel_sums_rows_and_columns_at_once() -> None:
    """On a GPU such kernels count rows behind the last one, and leave sums unwritten that share a tensor."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Tanh())
    step = cf.compile(model, loss_fn=F.mse_loss, backend="inductor", device_num=2)
    program = step.lower(*torch.randn(2, 4, 8)).program
    settings = []

    def compiled(*_: object) -> Callable[..., tuple[()]]:
        settings.append(config.triton.mix_order_reduction)
        return lambda given: ()

    with mock.patch("torch._inductor.compile_fx.compile_fx", side_effect=compiled):
        compiled_regions(program, rank=0)
    assert settings and not any(settings)
