"""The update of a compiled module that ranks share among them: parameters and states are those of torch's optimizer."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.odd_rows import OddRows
from tests.virtual.test_parallel_optimizer import OPTIMIZERS, SMALL, STEPS, groups_of

OWNED = {"parallel_optimizer_threshold": 0, "mode": "broadcast"}
CONFIGS = {"rows": SMALL, "rows that divide": {"parallel_optimizer_threshold": 0}, "owners": OWNED}


def sharded(ranks: int, name: str, config: dict[str, Any] | None, **options: Any) -> cf.ShardedOptimizer:
    """One over two groups of `OddRows`."""
    model = OddRows().double()
    plain = OPTIMIZERS[name](model.parameters())
    taken = inspect.signature(type(plain)).parameters
    given = {key: value for key, value in plain.defaults.items() if key in taken}
    compiled = cf.compile(model, device_num=ranks, **options)
    return cf.ShardedOptimizer(compiled, type(plain), groups_of(model), parallel_optimizer_config=config, **given)


def world_of(optimizer: cf.ShardedOptimizer) -> LockstepWorld:
    return LockstepWorld(optimizer._update)


def gradients(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """In some steps one parameter has none."""
    made = torch.Generator().manual_seed(step)
    found = {
        name: torch.randn(param.shape, generator=made, dtype=param.dtype)
        for name, param in model.named_parameters()
        if param.requires_grad
    }
    if step % 2:
        del found["back.weight"]
    return found


def train(world: LockstepWorld, steps: int = STEPS, drop: tuple[str, ...] = ()) -> nn.Module:
    for step in range(steps):
        given = gradients(world.models[0], step)
        world([(copy.deepcopy(given),) for _ in world.models], drop=drop)
    return world.models[0]


def train_alone(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = OddRows().double()
    optimizer = OPTIMIZERS[name](groups_of(model))
    for step in range(STEPS):
        given = gradients(model, step)
        for each, param in model.named_parameters():
            param.grad = given.get(each)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_updates_are_those_of_one_device(name: str, ranks: int) -> None:
    alone, plain = train_alone(name)
    for config in CONFIGS.values():
        world = world_of(sharded(ranks, name, config))
        train(world)
        states = plain.state_dict()["state"]
        for model, optimizer in zip(world.models, world.optimizers, strict=True):
            assert optimizer is not None
            for param, want in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(param, want, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(optimizer.state_dict()["state"], states, rtol=1e-12, atol=1e-14)


def test_pairs_of_ranks_share_updates() -> None:
    alone, _ = train_alone("adamw")
    optimizer = sharded(4, "adamw", {**SMALL, "optimizer_weight_shard_size": 2})
    assert [(each.kind, each.group) for each in optimizer.lower().collectives] == [("all_gather", (0, 1))]
    for param, want in zip(train(world_of(optimizer)).parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("config", [SMALL, OWNED], ids=["rows", "owners"])
def test_each_collective_is_needed(config: dict[str, Any]) -> None:
    options: dict[str, Any] = {"comm_fusion": {"openstate": False}}
    right = train(world_of(sharded(3, "adamw", config, **options)), steps=1)
    names = world_of(sharded(3, "adamw", config, **options)).collectives((gradients(OddRows().double(), 0),))
    assert len(names) == 8  # all but the scalar
    for name in names:
        world = world_of(sharded(3, "adamw", config, **options))
        train(world, steps=1, drop=(name,))
        wrong = [
            not torch.equal(one, other)
            for model in world.models
            for one, other in zip(model.parameters(), right.parameters(), strict=True)
        ]
        assert any(wrong), name


def test_what_is_shared_does_not_depend_on_which_parameters_have_a_gradient() -> None:
    world = world_of(sharded(2, "adamw", SMALL))
    train(world, steps=1)
    shards = world._ranks[0].shards
    train(world, steps=2)
    assert world._ranks[0].shards is shards and shards is not None
