"""Profiling on real ranks: training goes on as if nobody had measured."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from tests import captures
from tests.distributed.harness import Ranks
from tests.distributed.models_of_ranks import adamw, assert_same, momentum, xy
from tests.oracle import ACROSS_STEPS

pytestmark = pytest.mark.dist

Result = tuple[list[torch.Tensor], Any, Any, Any]


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)]
    made = nn.Sequential(*layers)
    captures.share(made, "profiled")
    return made


def train(
    profile_at: int, optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None, own_start: bool, **options: Any
) -> Result:
    """Three steps, with a profile before that number: losses, parameters, optimizer state and gradients."""
    made = model(dist.get_rank() if own_start else 0)
    if options.get("parallel_mode") == "semi_auto":
        cf.shard(made[0], weight=("dp", None))  # type: ignore[index]
    updates = None if optimizer is None else optimizer(made)
    step = cf.compile(made, loss_fn=F.cross_entropy, optimizer=updates, **options)
    torch.manual_seed(5)
    losses = []
    for number in range(3):
        x, y = xy(number, 0 if options.get("full_batch") else dist.get_rank())
        if number == profile_at:
            assert step.profile(x, y, rounds=1).node_seconds
        losses.append(step(x, y))
    step.synchronize()
    grads = [param.grad for param in made.parameters()]
    return losses, *copy.deepcopy((made.state_dict(), None if updates is None else updates.state_dict(), grads))


WAYS: dict[str, tuple[Any, ...]] = {
    "adamw": (adamw, False, {}),
    "momentum": (momentum, False, {}),
    "gradients": (None, False, {}),
    "broadcast": (adamw, True, {"parameter_broadcast": True}),
    "across steps": (adamw, False, ACROSS_STEPS),
    "across steps, broadcast": (momentum, True, {**ACROSS_STEPS, "parameter_broadcast": True}),
    "divided": (adamw, False, {"parallel_mode": "semi_auto", "full_batch": True}),
    "divided, gradients": (None, False, {"parallel_mode": "semi_auto", "full_batch": True}),
    "divided, broadcast": (
        adamw,
        True,
        {"parallel_mode": "semi_auto", "full_batch": True, "parameter_broadcast": True},
    ),
}


def with_and_without(way: str) -> list[Result]:
    optimizer, own_start, options = WAYS[way]
    return [train(at, optimizer, own_start, **options) for at in (-1, 0, 2)]


@pytest.mark.parametrize("way", list(WAYS))
def test_training_goes_on_as_without_a_profile(ranks: Ranks, way: str) -> None:
    found = ranks.values(with_and_without, way, size=2)
    for without, first, later in found:
        assert_same(first, without)
        assert_same(later, without)
    (one, *_), (other, *_) = found
    assert_same(one[1], other[1])


def read_alone() -> float:
    made = model(0)
    cf.shard(made[0], weight=("dp", None))  # type: ignore[index]
    step = cf.compile(made, loss_fn=F.cross_entropy, optimizer=adamw(made), parallel_mode="semi_auto", full_batch=True)
    step.profile(*xy(0, 0), rounds=1)
    return total(made) if dist.get_rank() == 0 else 0.0


def total(made: nn.Module) -> float:
    return sum(float(param.detach().sum()) for param in made.parameters())


def test_parameters_that_were_whole_are_whole_after_a_profile(ranks: Ranks) -> None:
    first, _ = ranks.values(read_alone, size=2)
    assert first == total(model(0))
