"""Operations on tensors, losses, inputs and outputs: three compiled steps leave what three eager steps leave."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.capture.architectures import Case, Cases, fn, ints, mean_square, r, seq
from tests.capture.equivalence import assert_trains_as_eager

pytestmark = pytest.mark.usefixtures("double_precision")
case = Cases()


# In-place and indexing


@case
def in_place() -> Case:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.lin(x).relu_().add(1.0)
        y[:, 0] = 0.5
        y[:, 1:3] *= 2
        y.masked_fill_(y > 3, 3.0)
        y.transpose(0, 1)[2].add_(x[:, 0])
        z = torch.zeros_like(y)
        z[:] = y
        z += m.lin(y)
        return z.clamp_(min=-1).sub_(0.1).tanh_()

    return fn(run, r(4, 8))


@case
def in_place_on_input() -> Case:
    return fn(lambda m, x: m.lin(x.mul_(2.0)), r(4, 8))


@case
def scatter_gather() -> Case:
    index = torch.tensor([[0, 2], [1, 1], [3, 0], [2, 2]])

    def run(m: Any, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y = m.lin(x)
        g = y.gather(1, i)
        s = torch.zeros(4, 8).scatter(1, i, g).scatter_add(1, i, g * 2)
        p = s.index_put((i[:, 0], i[:, 1]), g[:, 0], accumulate=True)
        p = p.index_add(0, i[:, 0] % 4, y).index_copy(1, torch.tensor([3]), y[:, :1])
        return p[i[:, 0]] + p.index_select(0, i[:, 1]) + torch.take_along_dim(y, i.repeat(1, 4), 1)

    return fn(run, r(4, 8), index)


@case
def topk_sort_cumsum() -> Case:
    def run(m: Any, x: torch.Tensor) -> Any:
        y = m.lin(x)
        values, where = y.topk(3, dim=1)
        return [
            values,
            y.sort(1, descending=True).values,
            y.cumsum(1),
            y.cumprod(1),
            y.gather(1, where),
            y.kthvalue(2, 1).values,
            y.max(1).values,
            y.amin(0),
            y.median(1).values,
            y.logcumsumexp(0),
        ]

    return fn(run, r(4, 8))


@case
def list_of_views() -> Case:
    def run(m: Any, x: torch.Tensor) -> Any:
        a, b = m.lin(x).chunk(2, dim=1)
        parts = torch.stack([a, b]).unbind(0)
        c, d, e = m.lin(x).split([2, 3, 3], dim=1)
        a = a.clone()
        a[0].zero_()
        return [a * b, parts[0], torch.cat([c, d * 2, e]) if False else d * e, x.unfold(1, 4, 2) @ m.lin.weight[:4, :4]]

    return fn(run, r(4, 8))


# Images and signals


@case
def pixel_shuffle_interpolate() -> Case:
    model = seq(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.PixelShuffle(2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.PixelUnshuffle(2),
        nn.Upsample(size=5, mode="nearest"),
        nn.Upsample(size=(7, 6), mode="bicubic"),
        nn.ReflectionPad2d(1),
        nn.ZeroPad2d(1),
        nn.ReplicationPad2d(1),
    )
    return model, (r(2, 2, 4, 4), r(2)), mean_square


@case
def grid_sample() -> Case:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        theta = m.lin(x.mean((1, 2, 3), keepdim=False).unsqueeze(1).repeat(1, 8))[:, :6].view(-1, 2, 3)
        return F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)

    return fn(run, r(2, 3, 6, 6))


@case
def fft() -> Case:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(m.lin(x))
        return torch.fft.irfft(spectrum * torch.view_as_complex(m.w), n=8) + spectrum.abs().sum()

    return fn(run, r(4, 8), w=nn.Parameter(r(5, 2)))


@case
def complex_parameter() -> Case:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.ifft(torch.fft.fft(m.lin(x)) * m.w).real

    return fn(run, r(4, 8), w=nn.Parameter(torch.randn(8, dtype=torch.complex128)))


@case
def einsum() -> Case:
    return fn(lambda m, x: torch.einsum("bij,kj,bkl->bil", m.lin(x), m.lin.weight, x.repeat(1, 4, 1)), r(2, 2, 8))


@case
def linear_algebra() -> Case:
    def run(m: Any, x: torch.Tensor) -> Any:
        a = m.lin(x)
        spd = torch.tanh(a @ a.mT) * 0.1 + 3 * torch.eye(8)
        return [
            torch.linalg.inv(spd),
            torch.linalg.cholesky(spd),
            torch.linalg.solve(spd, x),
            torch.logdet(spd),
            torch.linalg.svdvals(a),
            torch.linalg.norm(a),
            torch.linalg.qr(spd).R.abs(),
            torch.cdist(a, x),
        ]

    return fn(run, r(8, 8))


# Losses


def losses() -> dict[str, tuple[Any, Any]]:
    probabilities = torch.softmax(r(4, 8), 1)
    classes = ints(8, 4)
    return {
        "cross_entropy_weight": (nn.CrossEntropyLoss(weight=torch.rand(8), ignore_index=2), classes),
        "cross_entropy_soft": (nn.CrossEntropyLoss(), probabilities),
        "nll": (lambda o, t: F.nll_loss(F.log_softmax(o, 1), t), classes),
        "bce_logits": (nn.BCEWithLogitsLoss(pos_weight=torch.rand(8)), probabilities),
        "bce": (lambda o, t: F.binary_cross_entropy(o.sigmoid(), t), probabilities),
        "kl": (lambda o, t: F.kl_div(F.log_softmax(o, 1), t, reduction="batchmean"), probabilities),
        "huber": (nn.HuberLoss(), r(4, 8)),
        "smooth_l1": (nn.SmoothL1Loss(), r(4, 8)),
        "poisson": (nn.PoissonNLLLoss(), torch.rand(4, 8)),
        "cosine": (lambda o, t: F.cosine_embedding_loss(o, t, torch.ones(4)), r(4, 8)),
        "triplet": (lambda o, t: F.triplet_margin_loss(o, t, o.roll(1, 0)), r(4, 8)),
        "margin": (nn.MultiMarginLoss(), classes),
        "multilabel": (nn.MultiLabelSoftMarginLoss(), ints(2, 4, 8)),
    }


LOSSES = list(losses())


@pytest.mark.parametrize("name", LOSSES)
def test_loss(name: str) -> None:
    torch.manual_seed(3)
    loss, target = losses()[name]
    assert_trains_as_eager(nn.Linear(8, 8), [((r(4, 8), target), {})], loss)


@case
def ctc() -> Case:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(output.log_softmax(2), target, (6, 6), (3, 2))

    return (lambda: nn.Linear(8, 5)), (r(6, 2, 8), torch.randint(1, 5, (2, 3))), loss


# What is passed in and comes out


@dataclasses.dataclass
class _Batch:
    x: torch.Tensor
    scale: float
    extras: list[torch.Tensor]


@case
def dataclass_input() -> Case:
    return fn(lambda m, b: m.lin(b.x) * b.scale + b.extras[0], _Batch(r(4, 8), 2.0, [r(8)]))


@case
def nested_input() -> Case:
    batch = {
        "a": {"x": r(4, 8), "none": None},
        "flags": [True, 3],
        "list": [r(8), r(8)],
        "mask": torch.rand(4, 1) > 0.5,
    }

    def run(m: Any, b: Any) -> torch.Tensor:
        assert b["a"]["none"] is None
        return torch.where(b["mask"], m.lin(b["a"]["x"]) * b["flags"][1], sum(b["list"]))

    return fn(run, batch)


@case
def dict_output() -> Case:
    return fn(lambda m, x: {"a": m.lin(x), "b": (x, [m.lin(x)])}, r(4, 8))


@case
def input_requires_grad() -> Case:
    return fn(lambda m, x: m.lin(x), r(4, 8).requires_grad_(True))


@case
def input_expanded() -> Case:
    return fn(lambda m, x: m.lin(x), r(1, 8).expand(4, 8))


@case
def same_tensor_twice() -> Case:
    x = r(4, 8)
    return fn(lambda m, a, b: m.lin(a) * b, x, x)


@case
def zero_dimensional_input() -> Case:
    return fn(lambda m, x, t: m.lin(x) * t, r(4, 8), torch.tensor(0.3))


@pytest.mark.parametrize("name", list(case))
def test_architecture(name: str) -> None:
    case.check(name)
