"""Updates that neighbouring ranks share among them, while other ranks make the same ones."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.virtual.test_parallel_optimizer import (
    OPTIMIZERS,
    SMALL,
    batches,
    collectives,
    compiled,
    on_one_device,
    states_of,
    trained,
)

PAIRS = {**SMALL, "optimizer_weight_shard_size": 2}
APART = {"comm_fusion": {"openstate": False}}


@pytest.mark.parametrize(
    ("optimizer", "level", "fusion"),
    [
        *((each, 1, None) for each in OPTIMIZERS),
        *(("adamw", level, fusion) for level in (2, 3) for fusion in (None, {"openstate": False})),
        ("adamw", 1, {"openstate": False}),
    ],
)
def test_training_is_that_of_one_device(optimizer: str, level: int, fusion: Any) -> None:
    world = trained(compiled(4, optimizer, {**PAIRS, "level": level}, comm_fusion=fusion))
    model, eager = on_one_device(4, optimizer)
    for each, other in zip(world.models, world.optimizers, strict=True):
        for (name, param), (_, want) in zip(each.named_parameters(), model.named_parameters(), strict=True):
            torch.testing.assert_close(param, want, rtol=1e-9, atol=1e-12, msg=name)
        assert other is not None
        for state, want_state in zip(states_of(other), states_of(eager), strict=True):
            torch.testing.assert_close(state, want_state, rtol=1e-9, atol=1e-12, check_dtype=False)


@pytest.mark.parametrize(
    "others",
    [{}, {"gradients_mean": False}, {"mesh": (2, 2)}, {"schedule": "none"}, {"cluster": "gloo-1gbit"}],
    ids=str,
)
def test_it_is_the_training_of_plain_data_parallel(others: dict[str, Any]) -> None:
    """Also where some parameters are updated by every rank, whose gradients are means over all."""
    for options in (PAIRS, {"parallel_optimizer_threshold": 1, "optimizer_weight_shard_size": 2}):
        divided, plain = (trained(compiled(4, "adamw", each, **others)) for each in (options, None))
        for one, two in zip(divided.models, plain.models, strict=True):
            for param, want in zip(one.parameters(), two.parameters(), strict=True):
                torch.testing.assert_close(param, want, rtol=1e-9, atol=1e-12)


def test_rows_are_summed_with_the_ranks_that_have_the_same_ones() -> None:
    found = collectives(compiled(4, "adamw", PAIRS, **APART))
    assert Counter((each.kind, each.group) for each in found) == {
        ("reduce_scatter", (0, 1)): 8,
        ("all_reduce", (0, 2)): 8,
        ("all_gather", (0, 1)): 8,
        ("all_reduce", (0, 1, 2, 3)): 1,  # the scalar
    }
    assert [each.kind for each in collectives(compiled(4, "adamw", PAIRS))].count("all_reduce") == 2


def test_a_rank_holds_its_part_of_two() -> None:
    world = compiled(4, "adamw", {**PAIRS, "pad": False})
    state = world.step.lower(*batches(1, 0)[0]).explain().memory.held[2]
    even = sum(p.numel() for p in world.models[0].parameters() if p.requires_grad and p.ndim and p.shape[0] % 2 == 0)
    assert even > 0 and state.whole - state.per_rank == 2 * 8 * even / 2


def test_every_collective_is_needed() -> None:
    want = trained(compiled(4, "adamw", PAIRS, **APART))
    lowered = want.step.lower(*batches(1, 0)[0])
    names = [node.meta["commfuse"].name for node in lowered.program.collectives()]
    assert len(names) == 25
    for name in names:
        world = trained(compiled(4, "adamw", PAIRS, **APART), drop=[name])
        same = all(
            torch.allclose(param, other, rtol=1e-7, atol=1e-9)
            for one, two in zip(world.models, want.models, strict=True)
            for param, other in zip(one.parameters(), two.parameters(), strict=True)
        )
        assert not same, name


def test_all_ranks_is_the_default_and_one_rank_divides_nothing() -> None:
    def text(size: int) -> str:
        return compiled(4, "adamw", {**SMALL, "optimizer_weight_shard_size": size}).step.lower(*batches(1, 0)[0]).text()

    def graph(size: int) -> str:
        return text(size).split("# optimizer", 1)[1]

    assert graph(4) == graph(-1)
    lowered = compiled(4, "adamw", {**SMALL, "optimizer_weight_shard_size": 1}).step.lower(*batches(1, 0)[0])
    assert [each.kind for each in lowered.collectives] == ["all_reduce"]
    assert "into.weight: optimizer_weight_shard_size=1 leaves it to each rank" in lowered.explain().text()


WHERE = 'parallel_optimizer_config["optimizer_weight_shard_size"] is '


@pytest.mark.parametrize(
    ("size", "others", "message"),
    [
        (3, {}, "3, which does not divide the 4 ranks over which gradients are summed; use one of 1, 2, 4, or leave"),
        (8, {"mesh": (2, 2)}, "8, which does not divide the 4 ranks"),
        (2, {"mesh": (4,)}, "2, which is not the product of the last axes of dp=4, over which gradients are summed; "),
        (4, {"mesh": (2, 6), "device_num": 12}, "4, which is not the product of the last axes of dp=2xtp=6"),
    ],
)
def test_ranks_that_cannot_share_are_refused(size: int, others: dict[str, Any], message: str) -> None:
    model = nn.Linear(8, 8)
    options = {"parallel_optimizer_threshold": 0, "optimizer_weight_shard_size": size}
    with pytest.raises(ConfigValueError, match=re.escape(WHERE + message)):
        cf.compile(
            model, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            enable_parallel_optimizer=True, parallel_optimizer_config=options, **{"device_num": 4, **others},
        )  # fmt: skip


class Block(nn.Module):
    """The norm needs whole rows, so gradients of both weights are computed whole on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.norm(self.up(x))))


def divided_by_a_strategy(size: int, mesh: tuple[int, ...] = (2, 2, 2), level: int = 1) -> LockstepWorld:
    """On three axes: the batch over the first two, weights over the last."""
    model = Block().double()
    last = ("dp", "tp", "pp")[len(mesh) - 1]
    cf.shard(model, "up", weight=(last, None))
    cf.shard(model, "down", weight=(None, last))
    options = {**SMALL, "optimizer_weight_shard_size": size, "level": level}
    step = cf.compile(
        model, loss_fn=F.cross_entropy, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        parallel_mode="semi_auto", mesh=mesh, device_num=8, enable_parallel_optimizer=True,
        parallel_optimizer_config=options,
    )  # fmt: skip
    return LockstepWorld(step)


@pytest.mark.parametrize("level", [1, 3])
def test_parts_of_a_strategy_are_shared_by_some_of_the_ranks(level: int) -> None:
    """Tensor parallel on the last axis, sharing on the middle one, and the same on the first (as in HSDP)."""
    world = divided_by_a_strategy(2, level=level)
    for step in range(5):
        world([part for part in batches(4, step) for _ in range(2)])
    model = Block().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        sum(F.cross_entropy(model(x), y) for x, y in batches(4, step)).div(4).backward()
        optimizer.step()
    for each in world.models:
        for param, want in zip(each.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(param, want, rtol=1e-9, atol=1e-12)
    lowered = world.step.lower(*batches(1, 0)[0])
    kinds = Counter((each.kind, each.group) for each in lowered.collectives if "weight" in each.members[0])
    assert kinds["reduce_scatter", (0, 2)] == kinds["all_reduce", (0, 4)] == 1 and kinds["all_gather", (0, 2)] >= 1
    shared = [note.subject for note in lowered.explain().notes if note.topic == "sharded updates"]
    assert sorted(shared) == sorted(name for name, _ in model.named_parameters())
    held = lowered.explain().memory.held
    # Rows of 13 are padded to 14, which only the last bias has; a weight is a quarter on each rank.
    rows = 8 * (16 * 12 / 4 + 16 / 4 + 2 * 16 / 2 + 14 * 8 / 2 + 14 / 2)
    assert held[2].per_rank == 2 * rows + 4 * 6 and held[0].per_rank == (rows if level == 3 else held[0].per_rank)


def test_a_strategy_whose_axes_do_not_fit_is_refused() -> None:
    with pytest.raises(
        ConfigValueError, match=re.escape(f"{WHERE}2, which is not the product of the last axes of dp=4")
    ):
        divided_by_a_strategy(2, (4, 2)).step.lower(*batches(1, 0)[0])


class Sums(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + cf.ops.all_reduce(x.sum(), group="dp")


def test_a_model_names_the_axis_that_was_split() -> None:
    model = Sums()
    step = cf.compile(
        model, loss_fn=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), device_num=4,
        enable_parallel_optimizer=True, parallel_optimizer_config=PAIRS,
    )  # fmt: skip
    x, y = batches(1, 0)[0]
    found = step.lower(x.float(), y).collectives
    assert [each.group for each in found if each.phase == "forward"] == [(0, 1, 2, 3)]
