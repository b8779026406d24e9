"""clip_grad_norm on real ranks, against DistributedDataParallel with torch.nn.utils.clip_grad_norm_."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import commfuse_fx as cf
from tests.distributed.harness import Ranks, run_soon
from tests.distributed.models_of_ranks import (
    MODELS,
    OFF,
    assert_parameters_close,
    assert_same,
    batch,
    digest,
    eager_loss,
    loss_fn_of,
    mlp,
    momentum,
    snapshot,
    xy,
)
from tests.distributed.quick_trials import quickly
from tests.distributed.step_twins import Twins
from tests.oracle import ACROSS_STEPS, OPTIMAL, Own, by_class, clip

pytestmark = pytest.mark.dist

own = by_class(Own, lr=0.05, momentum=0.9)

LIMIT = 0.02
"""All gradients of these models together have a larger norm in every step."""

Make = Callable[[nn.Module], torch.optim.Optimizer]


def ddp_steps(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> None:
    wrapped = DistributedDataParallel(model)
    for number in range(4):
        optimizer.zero_grad()
        eager_loss(wrapped, kind, *batch(kind, number)).backward()
        assert clip(optimizer, LIMIT) > LIMIT
        optimizer.step()


def train(kind: str, make: Make, options: dict[str, Any]) -> nn.Module:
    model = MODELS[kind]()
    step = cf.compile(model, loss_fn=loss_fn_of(kind), optimizer=make(model), clip_grad_norm=LIMIT, **options)
    for number in range(4):
        args, kwargs = batch(kind, number)
        step(*args, **kwargs)
    step.synchronize()
    return model


PLANS: dict[str, dict[str, Any]] = {
    "default": {},
    "unfused": {"comm_fusion": OFF},
    "optimal": {"comm_fusion": OPTIMAL, "cluster": "gloo-1gbit"},
    "across steps": ACROSS_STEPS,
}


SHARDED: dict[str, Any] = {
    "enable_parallel_optimizer": True,
    "parallel_optimizer_config": {"parallel_optimizer_threshold": 1, "pad": True},
}


def matches_ddp(kind: str) -> str:
    reference = MODELS[kind]()
    ddp_steps(reference, momentum(reference), kind)
    trained = [train(kind, momentum, options) for options in (*PLANS.values(), SHARDED)]
    for model in trained:
        assert_parameters_close(model, reference)
    return digest(trained[0])


@pytest.mark.parametrize(("kind", "size"), [*((kind, 2) for kind in MODELS), ("mlp", 3)])
def test_training_matches_ddp(ranks: Ranks, kind: str, size: int) -> None:
    assert len({*ranks.values(matches_ddp, kind, size=size)}) == 1


def has_the_bits_of_ddp(kind: str) -> None:
    reference = MODELS[kind]()
    ddp_steps(reference, own(reference), kind)
    for name, options in PLANS.items():
        assert_same(snapshot(train(kind, own, options))[0], snapshot(reference)[0], name)


def test_gradients_handed_to_the_optimizer_have_the_bits_of_ddp(ranks: Ranks) -> None:
    """Its own step() is called on them, so nothing else can differ."""
    run_soon(ranks, has_the_bits_of_ddp, "mlp")


def tries_plans(winner: str) -> list[str]:
    with quickly(winner):
        twins = Twins(shared={"clip_grad_norm": LIMIT})
        twins.settle()
        twins.check()
    return twins.tried()


@pytest.mark.parametrize("winner", ["size 1", "across steps"])
def test_training_is_the_same_whatever_plan_is_tried(ranks: Ranks, winner: str) -> None:
    one, other = ranks.values(tries_plans, winner)
    assert one == other and len(one) > 2


def one_device(model: nn.Module, steps: int, size: int) -> None:
    """Clipped steps on the global batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(steps):
        x, y = (torch.cat(each) for each in zip(*(xy(number, rank) for rank in range(size)), strict=True))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        assert clip(optimizer, LIMIT) > LIMIT
        optimizer.step()


def divided() -> None:
    model = mlp()
    reference = copy.deepcopy(model)
    one_device(reference, 4, dist.get_world_size())
    cf.shard(model[0], weight=("tp", None), bias=("tp",))
    cf.shard(model[2], weight=(None, "tp"))
    step = cf.compile(
        model,
        loss_fn=F.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        parallel_mode="semi_auto",
        mesh=(1, dist.get_world_size()),
        full_batch=True,
        clip_grad_norm=LIMIT,
    )
    for number in range(4):
        step(*(torch.cat(each) for each in zip(*(xy(number, rank) for rank in range(2)), strict=True)))
    assert_parameters_close(model, reference)


def test_divided_parameters(ranks: Ranks) -> None:
    ranks.values(divided)


def of_single_ranks() -> dict[str, torch.Tensor]:
    model = mlp()
    model[2].weight.layerwise_parallel = True
    step = cf.compile(
        model,
        loss_fn=F.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        parallel_mode="hybrid_parallel",
        clip_grad_norm=LIMIT,
    )
    for number in range(4):
        step(*xy(number))
    return {name: param.detach() for name, param in model.named_parameters()}


def test_parameters_that_ranks_have_in_common_stay_the_same_beside_others(ranks: Ranks) -> None:
    one, other = ranks.values(of_single_ranks)
    assert [name for name in one if not torch.equal(one[name], other[name])] == ["2.weight"]
