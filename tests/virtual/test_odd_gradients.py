"""Gradients of unusual shape, memory and origin, reduced and applied."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.models import MLP_CASE, SHARED, Case, shards
from tests.oracle import (
    MakeOptimizer,
    assert_same,
    assert_same_tensors,
    eager_gradients,
    make_world,
    sgd,
    tensors_of,
    train_reference,
    train_world,
)


class Odd(nn.Module):
    """One linear layer beside what a subclass adds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.extra(self.layer(x))

    def extra(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class ScalarParameter(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def extra(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class ExpandedGradient(Odd):
    """The gradient of p.sum() is one number expanded to the shape of p."""

    def __init__(self) -> None:
        super().__init__()
        self.added = nn.Parameter(torch.randn(3, 4))

    def extra(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.added.sum()


class EmptyParameter(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.randn(0, 5))

    def extra(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.nothing.sum(0)


class ViewsOfOneGradient(Odd):
    """Two parameters of different shape whose gradients are one value seen twice."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.randn(10))
        self.table = nn.Parameter(torch.randn(2, 5))

    def extra(self, x: torch.Tensor) -> torch.Tensor:
        both = self.flat + self.table.view(-1)
        return x * torch.sin(both).view(2, 5).sum(0)


class TransposedGradient(Odd):
    """The gradient of a weight used transposed is itself a transposed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))

    def extra(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight + self.weight.t()).t()


class SlicedParameter(Odd):
    """Only part of the parameter is used; the rest has zero gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 5))

    def extra(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[2] * self.table[4].detach()


class UsedTwice(Odd):
    def extra(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(x), self.layer.weight[:, :5], self.layer.bias)


class GappedParameter(Odd):
    """A parameter that is a slice of a larger tensor: its memory has gaps, so it cannot move."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Parameter(torch.randn(5, 9)[:, :5])

    def extra(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.part


ODD = [Case(cls.__name__, cls, MLP_CASE.batch) for cls in Odd.__subclasses__()]


@pytest.mark.parametrize("case", ODD, ids=lambda case: case.name)
@pytest.mark.parametrize("make_optimizer", [None, sgd], ids=["gradients", "whole_step"])
@pytest.mark.parametrize("fusion", [None, {"openstate": False}], ids=["fused", "unfused"])
def test_odd_gradients(case: Case, make_optimizer: MakeOptimizer | None, fusion: Any) -> None:
    model, batches = case.model(), case.batches(2)
    want = train_reference(case, model, batches, 2, make_optimizer)
    world = make_world(case, copy.deepcopy(model), 2, make_optimizer, fusion)
    assert_same(train_world(world, batches), want, gradients=make_optimizer is None)


class TwoPrecisions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(12, 16).bfloat16()
        self.high = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.high(torch.tanh(self.low(x.bfloat16())).float())


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_two_dtypes_in_one_param_group(name: str) -> None:
    case = Case("two", TwoPrecisions, MLP_CASE.batch)
    torch.manual_seed(0)
    model, batches = TwoPrecisions(), case.batches(2, dtype=torch.float32)

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        return made

    want = train_reference(case, model, batches, 2, make_optimizer)
    assert_same(train_world(make_world(case, model, 2, make_optimizer), batches), want, tolerance=1e-2)


def test_an_optimizer_over_some_of_the_parameters() -> None:
    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(model.parameters())[2:5], lr=0.01)

    model, batches = MLP_CASE.model(), MLP_CASE.batches(3)
    want = train_reference(MLP_CASE, model, batches, 2, make_optimizer)
    assert_same(train_world(make_world(MLP_CASE, model, 2, make_optimizer), batches), want)


@pytest.mark.parametrize("local", ["a", "b"])
@pytest.mark.parametrize("fusion", [None, {"openstate": False}], ids=["fused", "unfused"])
def test_one_gradient_reduced_for_one_parameter_only(local: str, fusion: Any) -> None:
    model, (batch,) = SHARED.model(), SHARED.batches(1)
    model.get_parameter(local).layerwise_parallel = True  # type: ignore[attr-defined]
    mean = eager_gradients(SHARED, model, batch)
    own = [eager_gradients(SHARED, model, part) for part in shards(batch, 2)]
    world = make_world(SHARED, model, 2, None, fusion, parallel_mode="hybrid_parallel")
    for mine, grads in zip(train_world(world, [batch]), own, strict=True):
        assert_same_tensors(tensors_of(mine, gradients=True), {**mean, local: grads[local]}, 1e-10)
