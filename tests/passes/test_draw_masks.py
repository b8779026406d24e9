"""Masks from 16 random bits per number: what they are made of, and where they are used."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.frontends.step import CompiledStep
from commfuse_fx.kernels import masks
from commfuse_fx.kernels.masks import bernoulli, bernoulli_
from commfuse_fx.virtual.virtual_world import LockstepWorld

N = 1 << 20


@pytest.fixture
def drawn_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw as on a processor for which torch has no vectorised kernel."""
    monkeypatch.setattr(masks, "_draws_one_by_one", lambda: True)
    torch.manual_seed(0)


@pytest.mark.usefixtures("drawn_here")
@pytest.mark.parametrize("p", [0.0, 1e-4, 0.1, 0.5, 0.9, 1 - 1e-4, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool])
def test_numbers_are_one_with_probability_p(p: float, dtype: torch.dtype) -> None:
    mask = bernoulli_(torch.empty(N, dtype=dtype), p)
    assert mask.dtype == dtype
    assert bool(((mask == 0) | (mask == 1)).all())
    for lane in range(4):  # the parts of a 64-bit word
        assert abs(float(mask[lane::4].double().mean()) - p) <= 5 * (p * (1 - p) * 4 / N) ** 0.5


@pytest.mark.usefixtures("drawn_here")
@pytest.mark.parametrize("p", [2.0**-18, 1e-5, 3.7e-5, 1 - 1e-5])
def test_probabilities_that_16_bits_cannot_say_are_exact(p: float) -> None:
    numbers, draws = 1 << 17, 2000
    drawn = [float(bernoulli_(torch.empty(numbers, dtype=torch.bool), p).sum()) for _ in range(draws)]
    counts = torch.tensor(drawn, dtype=torch.float64)
    variance = numbers * p * (1 - p)
    assert abs(float(counts.mean()) - numbers * p) < 5 * (variance / draws) ** 0.5
    # Numbers that depend on each other would have another one: 1.7 times this at 1e-5 if they shared a rounding of p.
    error = (2 / draws + 1 / (draws * variance)) ** 0.5
    assert abs(float(counts.var()) / variance - 1) < 5 * error


@pytest.mark.usefixtures("drawn_here")
def test_every_place_is_drawn_alike() -> None:
    for value, background in ((1, torch.zeros), (0, torch.ones)):
        counts = torch.zeros(64)
        for _ in range(20000):
            numbers = background(64)
            masks._sprinkle(numbers, 0.02, value)
            counts += numbers == value
        expected = 20000 * 0.02
        assert float((counts - expected).abs().max()) < 5 * expected**0.5


@pytest.mark.usefixtures("drawn_here")
@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, 64, 624, 1248, 2496])
def test_neighbours_do_not_correlate(lag: int) -> None:
    mask = bernoulli_(torch.empty(N), 0.5).double() - 0.5
    assert abs(float((mask[lag:] * mask[:-lag]).mean() * 4)) < 5 / N**0.5


@pytest.mark.usefixtures("drawn_here")
def test_draws_are_those_of_the_default_generator() -> None:
    first, second = bernoulli_(torch.empty(999), 0.5), bernoulli_(torch.empty(999), 0.5)
    assert 300 < int((first != second).sum()) < 700
    torch.manual_seed(0)
    assert torch.equal(bernoulli(torch.empty(999), 0.5), first)
    assert torch.equal(bernoulli(torch.empty(999), 0.5), second)


@pytest.mark.usefixtures("drawn_here")
def test_memory_in_any_order_is_filled() -> None:
    base = torch.full((4, 8, 6, 10), 7.0).to(memory_format=torch.channels_last)
    pointer = base.data_ptr()
    assert bernoulli_(base, 0.5).data_ptr() == pointer
    assert set(base.unique().tolist()) == {0.0, 1.0}
    assert bernoulli(base, 0.5).stride() == base.stride()
    with_gaps = torch.full((64, 64), 7.0)
    bernoulli_(with_gaps[:, ::2], 0.5)
    assert set(with_gaps[:, ::2].unique().tolist()) == {0.0, 1.0} and bool((with_gaps[:, 1::2] == 7).all())
    assert float(bernoulli_(torch.empty(()), 1.0)) == 1 and bernoulli_(torch.empty(0), 0.5).numel() == 0


def test_a_vectorised_kernel_of_torch_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_draws_one_by_one", lambda: False)
    torch.manual_seed(0)
    drawn = bernoulli_(torch.empty(1000), 0.3)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.empty(1000).bernoulli_(0.3))


class Masked(nn.Module):
    """The gradient of `weight` is the dropout mask, divided by 0.75."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.weight.layerwise_parallel = True
        self.shared = nn.Parameter(torch.ones(1))
        self.drop = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (self.drop(self.weight * x) * self.shared).sum()
        return out


LARGE, SMALL = 20000, 16383


def compiled(size: int, world: int, mode: str = "data_parallel") -> CompiledStep:
    return cf.compile(Masked(size), device_num=world, global_rank=0, parallel_mode=mode, form="step")


def test_large_masks_of_several_ranks_are_drawn_so() -> None:
    large, small = (compiled(size, 2).lower(torch.ones(size)).text() for size in (LARGE, SMALL))
    assert "commfuse.bernoulli_(" in large and "aten.bernoulli" not in large
    assert "aten.bernoulli_.float(" in small and "commfuse.bernoulli" not in small
    assert "commfuse.bernoulli" not in compiled(LARGE, 1).lower(torch.ones(LARGE)).text()
    alone = compiled(LARGE, 2, "stand_alone").lower(torch.ones(LARGE)).text()
    assert "commfuse.bernoulli" not in alone


def test_forward_and_backward_drop_the_same_numbers() -> None:
    step = compiled(LARGE, 2, "hybrid_parallel")
    results = LockstepWorld(step)([(torch.ones(LARGE),), (torch.ones(LARGE),)])
    seen = []
    for result in results:
        grad = result.grads["weight"]
        kept = grad != 0
        torch.testing.assert_close(grad[kept], torch.full_like(grad[kept], 1 / 0.75))
        torch.testing.assert_close(result.loss, grad.sum())
        assert abs(float(kept.double().mean()) - 0.75) < 5 * (0.75 * 0.25 / LARGE) ** 0.5
        seen.append(kept)
    assert 0.3 < float((seen[0] != seen[1]).double().mean()) < 0.45


def test_one_rank_draws_what_eager_execution_draws() -> None:
    world = LockstepWorld(compiled(LARGE, 1))
    x = torch.ones(LARGE)
    torch.manual_seed(5)
    (result,) = world([(x,)])
    torch.manual_seed(5)
    torch.testing.assert_close(result.loss, Masked(LARGE)(x))
