"""Ranks whose modules differ: they agree, or each of them is told in what."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commfuse_fx as cf
from tests.distributed.harness import Ranks
from tests.distributed.loops_of_modules import assert_as_ddp, batch, grads
from tests.distributed.test_module import Branches

pytestmark = pytest.mark.dist


def other_branches() -> str:
    model = Branches()
    wrapped = cf.compile(model)
    model.branch = dist.get_rank()
    with pytest.raises(cf.PlanMismatchError) as error:
        wrapped(batch(0)).square().mean().backward()
    assert all(param.grad is None for param in model.parameters())
    model.branch = 0
    wrapped(batch(0)).square().mean().backward()  # nothing is lost
    return str(error.value)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_use_other_parameters_are_told(ranks: Ranks, size: int) -> None:
    for text in ranks.values(other_branches, size=size):
        assert "rank 1 has no gradient of layers.0.weight" in text and "find_unused_parameters=True" in text


def other_kinds(kind: str, finds_unused: bool) -> str:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 1))
    wrapped = cf.compile(model, find_unused_parameters=finds_unused)
    if dist.get_rank() and kind == "frozen":
        model[1].bias.requires_grad_(False)
    elif dist.get_rank():
        model.to(**{kind: torch.channels_last if kind == "memory_format" else torch.float64})
    with pytest.raises(cf.PlanMismatchError) as error:
        wrapped(torch.randn(2, 2, 5, 5, dtype=model[0].weight.dtype)).square().mean().backward()
    return str(error.value)


@pytest.mark.parametrize("finds_unused", [False, True])
def test_ranks_whose_parameters_are_of_other_kinds_are_told(ranks: Ranks, finds_unused: bool) -> None:
    for text in ranks.values(other_kinds, "memory_format", finds_unused):
        assert "rank 0: gradient of 0.weight: f32[3,2,3,3]\n  rank 1: gradient of 0.weight: f32[3,2,3,3](18,1" in text
        assert "the same memory format" in text and "find_unused" not in text
    for text in ranks.values(other_kinds, "dtype", finds_unused):
        assert "rank 1: gradient of 0.weight: f64[3,2,3,3]" in text and "find_unused" not in text
    for text in ranks.values(other_kinds, "frozen", finds_unused):
        assert "rank 1 has no gradient of 1.bias: f32[2]\nFreeze the same parameters on every rank" in text


class Repeats(nn.Module):
    """A layer that is called several times. With one call gradients are ready in another order."""

    times = 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


def other_order(finds_unused: bool) -> str:
    model = Repeats()
    model.times += dist.get_rank()
    twin = copy.deepcopy(model)
    wrapped = cf.compile(model, cpu_kernels=False, find_unused_parameters=finds_unused)
    loss = wrapped(batch(0)).square().mean()
    if not finds_unused:
        with pytest.raises(cf.PlanMismatchError) as error:
            loss.backward()
        return str(error.value)
    loss.backward()
    other = nn.parallel.DistributedDataParallel(twin)
    other(batch(0)).square().mean().backward()
    assert_as_ddp(grads(model), grads(twin))
    return ""


def test_ranks_that_compute_gradients_in_other_orders(ranks: Ranks) -> None:
    for text in ranks.values(other_order, False):
        assert "Give every rank the same order" in text and "find_unused_parameters=True" in text
    ranks.values(other_order, True)


def same_parameters() -> None:
    """Ranks that compute other things with the same parameters agree."""
    model = Branches()
    wrapped = cf.compile(model)
    rows = 3 + dist.get_rank()
    model.register_forward_hook((lambda module, args, out: out * 2) if dist.get_rank() else lambda *_: None)
    for _ in range(2):
        wrapped(batch(0, rows)).square().mean().backward()
    checks = [torch.zeros_like(model.layers[0].weight.grad) for _ in range(dist.get_world_size())]
    dist.all_gather(checks, model.layers[0].weight.grad)
    assert all(torch.equal(each, checks[0]) for each in checks)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_may_take_different_branches(ranks: Ranks, size: int) -> None:
    ranks.values(same_parameters, size=size)


def different_models() -> str:
    width = 6 + dist.get_rank()
    with pytest.raises(cf.PlanMismatchError) as error:
        cf.compile(nn.Sequential(nn.Linear(6, width), nn.Linear(width, 2)))
    return str(error.value)


def test_ranks_with_other_parameters_are_named(ranks: Ranks) -> None:
    for text in ranks.values(different_models):
        assert "rank 1 has no 0.weight: float32[6, 6]" in text and "rank 0 has no 0.weight: float32[7, 6]" in text
