"""Evaluations while ranks hold parts of parameters alone: each is gathered where it is used."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.cost.memory import peak_memory
from commfuse_fx.virtual.virtual_world import LockstepWorld

RANKS, WIDTH = 3, 12
ALONE = {"parallel_optimizer_threshold": 0, "pad": True, "level": 3}
APART = {"comm_fusion": {"openstate": False}}


class Branches(nn.Module):
    """A layer that training alone uses, one that evaluation alone uses, and one that neither does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.trained, self.evaluated, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.shared(x))
        used = self.trained(hidden) if self.training else hidden + self.evaluated.weight.sum()
        return {"loss": F.mse_loss(used, y) + self.evaluated(x).mean(), "weight": self.shared.weight}


def world_of(model: nn.Module, options: dict[str, Any], **others: Any) -> LockstepWorld:
    others = {"form": "step", "device_num": RANKS, **APART, **others}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    divided = {"enable_parallel_optimizer": True, "parallel_optimizer_config": options} if options else {}
    return LockstepWorld(cf.compile(model, optimizer=optimizer, **divided, **others))


def batches(step: int, ranks: int = RANKS, rows: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(step)
    x, y = (torch.randn(ranks * rows, WIDTH, generator=made) for _ in range(2))
    return list(zip(x.chunk(ranks), y.chunk(ranks), strict=True))


def mode(world: LockstepWorld, training: bool) -> None:
    for model in world.models:
        model.train(training)


def losses(world: LockstepWorld, drop: tuple[str, ...] = ()) -> list[list[torch.Tensor]]:
    """Of two steps, two evaluations of different sizes, and two steps more."""
    found = []
    for training, rows in ((True, 4), (True, 4), (False, 4), (False, 3), (True, 4), (True, 4)):
        mode(world, training)
        made = batches(len(found), len(world.models), rows)
        found.append([result.loss for result in world(made, drop=drop if not training and rows == 4 else ())])
    return found


def sent(world: LockstepWorld) -> list[str]:
    """The members of what the last call has sent, with kinds."""
    assert world._running is not None
    text = [node.meta["commfuse"].collective for node in world._running.program.collectives()]
    return [f"{each.kind} {member}" for each in text for member in each.members]


def memory(world: LockstepWorld) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return sum(param.untyped_storage().nbytes() for param in world.models[0].parameters())


def test_an_evaluation_gathers_what_it_uses() -> None:
    world = world_of(Branches(), ALONE)
    for training in (True, False):
        mode(world, training)
        world(batches(0))
    assert sorted(sent(world)) == [
        f"all_gather {layer}.{each}" for layer in ("evaluated", "shared") for each in ("bias", "weight")
    ]
    frozen = memory(world)
    assert frozen == sum(each.numel() * 4 for each in world.models[0].unused.parameters())  # no gradient reaches it
    mode(world, True)
    world(batches(1))
    assert memory(world) == frozen


@pytest.mark.parametrize(
    "others",
    [{}, {"accumulate_steps": 2}, {"schedule": cf.ScheduleConfig(across_steps=True), "cluster": "gloo-1gbit"}],
    ids=["default", "micro-batches", "across steps"],
)
def test_values_are_those_of_whole_parameters(others: dict[str, Any]) -> None:
    found, wanted = (losses(world_of(Branches(), options, **others)) for options in (ALONE, {}))
    torch.testing.assert_close(found, wanted)


def test_a_gather_that_is_left_out_is_noticed() -> None:
    world = world_of(Branches(), ALONE)
    for training in (True, False):
        mode(world, training)
        world(batches(0))
    names = world.collectives(batches(0)[0])
    wanted = losses(world_of(Branches(), ALONE))[2]
    assert len(names) == 4
    for name in names:
        found = losses(world_of(Branches(), ALONE), (name,))[2]
        assert not all(torch.allclose(one, other) for one, other in zip(found, wanted, strict=True)), name


def test_what_is_whole_is_evaluated_without_sending() -> None:
    """Before the first step, and after somebody has read the parameters: ranks may then evaluate alone."""
    world = world_of(Branches(), ALONE)
    mode(world, False)
    world(batches(0))
    assert not sent(world)
    mode(world, True)
    world(batches(0))
    mode(world, False)
    copy.deepcopy(world.models[0].state_dict())
    world(batches(0))
    assert not sent(world)
    mode(world, True)
    world(batches(0))
    mode(world, False)
    world(batches(0))
    assert len(sent(world)) == 4


@pytest.mark.parametrize("options", [{**ALONE, "level": 1}, ALONE, {**ALONE, "level": 1, "mode": "broadcast"}])
def test_a_divided_model_keeps_its_parts(options: dict[str, Any]) -> None:
    """On 2 x 2 ranks, with two layers that a strategy divides."""
    found = []
    for chosen in (options, {}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH))
        cf.shard(model[0], weight=("tp", None))
        cf.shard(model[2], weight=(None, "tp"))
        cut = {"device_num": 4, "loss_fn": F.mse_loss, "parallel_mode": "semi_auto", "mesh": (2, 2), "form": None}
        world = world_of(model, chosen, **cut)
        found.append([])
        shards: Any = None
        for training in (False, True, False, True, False):
            mode(world, training)
            given = batches(len(found[-1]), 2)
            found[-1].append([result.loss for result in world([given[0], given[0], given[1], given[1]])])
            shards = world._ranks[0].shards if training else shards
        assert shards is world._ranks[0].shards and shards.is_divided
    torch.testing.assert_close(*found)


def test_few_parameters_are_whole_at_once() -> None:
    def build(level: int) -> LockstepWorld:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12)))
        return LockstepWorld(
            cf.compile(
                model, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), device_num=4,
                enable_parallel_optimizer=True, parallel_optimizer_config={"level": level}, **APART,
            )
        )  # fmt: skip

    peaks = []
    for level in (1, 3):
        world = build(level)
        x = torch.randn(2, 256)
        for training in (True, False):
            mode(world, training)
            world([(x, x)] * 4)
        assert world._running is not None
        peaks.append(round(peak_memory(world._running.program) / (256 * 256 * 4), 1))
    assert peaks == [12.0, 5.0]


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = self.layer(x)
        return F.mse_loss(made.float(), y)


def test_under_autocast_casts_are_gathered() -> None:
    world = world_of(Narrow(), ALONE)
    for training in (True, False):
        mode(world, training)
        world(batches(0))
    assert world._running is not None
    nodes = list(world._running.program.collectives())
    assert [node.meta["commfuse"].collective.dtype for node in nodes] == [torch.bfloat16] * 2
