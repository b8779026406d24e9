"""Several calls for one update whose ranks share the updates: sums of rows, and parameters that are gathered for each
micro-batch. Parameters and states are those of one device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.odd_rows import OddRows
from tests.virtual.test_parallel_optimizer import OPTIMIZERS, SMALL, batches, compiled, groups_of, states_of

COUNT, UPDATES, LIMIT = 2, 5, 0.05
APART = {"openstate": False}
ROWS = {**SMALL, "gradient_accumulation_shard": True}
OWNERS = {"parallel_optimizer_threshold": 0, "mode": "broadcast", "gradient_accumulation_shard": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "rows": ROWS,
    "undivided rows stay whole": {"parallel_optimizer_threshold": 1, "gradient_accumulation_shard": True},
    "some ranks": {**ROWS, "optimizer_weight_shard_size": 2},
    "owners": OWNERS,
    "level 2": {**ROWS, "level": 2},
    "owners, level 2": {**OWNERS, "level": 2},
    "level 3": {**SMALL, "level": 3},
    "level 3, rows": {**ROWS, "level": 3},
}


def given(ranks: int, update: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """For each micro-batch of an update the ranks' batches."""
    return [batches(ranks, COUNT * update + number) for number in range(COUNT)]


def trained(world: LockstepWorld) -> LockstepWorld:
    for update in range(UPDATES):
        for parts in given(len(world.models), update):
            world(parts)
    return world


def on_one_device(ranks: int, optimizer: str, clip: float | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = OddRows().double()
    made = OPTIMIZERS[optimizer](groups_of(model))
    for update in range(UPDATES):
        made.zero_grad()
        for parts in given(ranks, update):
            sum(F.cross_entropy(model(x), y) for x, y in parts).div(ranks * COUNT).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        made.step()
    return model, made


def assert_trained(world: LockstepWorld, want: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    for each, optimizer in zip(world.models, world.optimizers, strict=True):
        torch.testing.assert_close(list(each.parameters()), list(want[0].parameters()), rtol=1e-9, atol=1e-12)
        assert optimizer is not None
        for state, other in zip(states_of(optimizer), states_of(want[1]), strict=True):
            torch.testing.assert_close(state, other, rtol=1e-9, atol=1e-12, check_dtype=False)


@pytest.mark.parametrize("clip", [None, LIMIT], ids=["", "clipped"])
@pytest.mark.parametrize(("ranks", "optimizer"), [(2, "sgd"), (4, "adamw")])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_training_is_that_of_one_device(config: dict[str, Any], ranks: int, optimizer: str, clip: float | None) -> None:
    world = trained(compiled(ranks, optimizer, config, accumulate_steps=COUNT, clip_grad_norm=clip))
    assert_trained(world, on_one_device(ranks, optimizer, clip))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["rows", "owners", "level 3", "level 3, rows"])
def test_any_number_of_ranks_and_no_buckets(name: str, ranks: int) -> None:
    world = trained(compiled(ranks, "adam", CONFIGS[name], accumulate_steps=COUNT, comm_fusion=APART))
    assert_trained(world, on_one_device(ranks, "adam"))


@pytest.mark.parametrize("name", ["rows", "owners", "level 3, rows"])
def test_updates_across_steps(name: str) -> None:
    across = {"schedule": cf.ScheduleConfig(across_steps=True), "cluster": "gloo-1gbit"}
    world = trained(compiled(3, "adamw", CONFIGS[name], accumulate_steps=COUNT, **across))
    assert_trained(world, on_one_device(3, "adamw"))


def _lowered(world: LockstepWorld) -> tuple[cf.Lowered, cf.Lowered]:
    batch = batches(1, 0)[0]
    return world.step.lower_micro_batch(*batch), world.step.lower(*batch)


def _kinds(lowered: cf.Lowered) -> dict[str, int]:
    return dict(Counter(f"{each.kind} {each.phase}" for each in lowered.collectives))


@pytest.mark.parametrize(
    ("name", "early", "last"),
    [
        # Of 9 gradients all but that of the scalar are scattered; it is reduced in the last micro-batch alone.
        ("rows", {"reduce_scatter backward": 8}, {"reduce_scatter backward": 8, "all_reduce backward": 1}),
        ("owners", {"reduce backward": 8}, {"reduce backward": 8, "all_reduce backward": 1}),
        ("some ranks", {"reduce_scatter backward": 8}, {"reduce_scatter backward": 8, "all_reduce backward": 9}),
        (
            "level 3",
            {"all_gather forward": 8, "all_gather backward": 2},
            {"all_gather forward": 8, "all_gather backward": 2, "reduce_scatter backward": 8, "all_reduce backward": 1},
        ),
        (
            "level 3, rows",
            {"all_gather forward": 8, "all_gather backward": 2, "reduce_scatter backward": 8},
            {"all_gather forward": 8, "all_gather backward": 2, "reduce_scatter backward": 8, "all_reduce backward": 1},
        ),
    ],
)
def test_what_each_micro_batch_sends(name: str, early: dict[str, int], last: dict[str, int]) -> None:
    world = compiled(4, "adamw", CONFIGS[name], accumulate_steps=COUNT, comm_fusion=APART)
    found = [_kinds(each) for each in _lowered(world)]
    assert found[0] == early
    assert {kind: count for kind, count in found[1].items() if not kind.endswith("update")} == last


@pytest.mark.parametrize("name", ["rows", "owners", "level 3, rows"])
def test_every_collective_of_every_micro_batch_is_needed(name: str) -> None:
    world = compiled(3, "plain sgd", CONFIGS[name], accumulate_steps=COUNT, comm_fusion=APART)
    first = [param.detach().clone() for param in world.models[0].parameters()]

    def updated(number: int, drop: str) -> list[torch.Tensor]:
        """The parameters of all ranks after an update, with one collective left out of one of its micro-batches."""
        for model in world.models:
            with torch.no_grad():
                for param, value in zip(model.parameters(), first, strict=True):
                    param.copy_(value)
        for each, parts in enumerate(given(3, 0)):
            world(parts, drop=[drop] if each == number else ())
        return [param.detach().clone() for model in world.models for param in model.parameters()]

    want = updated(-1, "")
    for number, lowered in enumerate(_lowered(world)):
        starts = [node for node in lowered.graph_module.graph.nodes if node.meta["commfuse"].collective is not None]
        assert len(starts) >= 8
        for drop in [node.meta["commfuse"].name for node in starts]:
            found = updated(number, drop)
            assert not all(map(torch.allclose, found, want)), f"{drop} of micro-batch {number}"
    assert all(map(torch.equal, updated(-1, ""), want))


@pytest.mark.parametrize("name", ["rows", "owners", "level 3", "level 3, rows"])
def test_a_rank_holds_sums_of_what_it_updates(name: str) -> None:
    ranks = 3
    world = compiled(ranks, "adamw", CONFIGS[name], accumulate_steps=COUNT)
    world(given(ranks, 0)[0])
    held = [sum(tensor.nbytes for _, tensor in rank.held._held.values()) for rank in world._ranks]
    params = [param for param in OddRows().double().parameters() if param.requires_grad]
    whole = sum(param.nbytes for param in params)
    (sums,) = [each for each in _lowered(world)[1].explain().memory.held if each.kind == "sums of micro-batches"]
    assert sums.whole == whole and sums.per_rank == max(held)
    early = _lowered(world)[0].explain().memory
    assert early.held[1:] == (sums,) and "the graph of the last micro-batch shows gradients" in early.text()
    if name == "level 3":
        assert held == [whole] * ranks
    elif name == "owners":
        assert sum(held) == whole + (ranks - 1) * 8  # all have the scalar
    else:
        padded = sum(-(-param.shape[0] // ranks) * ranks * param[0].numel() for param in params if param.ndim)
        assert held == [8 * (padded // ranks + 1)] * ranks


@pytest.mark.parametrize("name", ["rows", "owners", "level 3", "level 3, rows"])
def test_evaluation_other_sizes_and_a_state_that_is_read_come_between_micro_batches(name: str) -> None:
    worlds = [compiled(2, "adamw", config, accumulate_steps=COUNT) for config in (CONFIGS[name], None)]
    for world in worlds:
        for update in range(UPDATES):
            for number, parts in enumerate(given(2, update)):
                rows = 3 + (update + number) % 3
                world([(x[:rows], y[:rows]) for x, y in parts])
                if update == 1:
                    for model in world.models:
                        model.eval()
                    world(given(2, 0)[0])
                    for model, optimizer in zip(world.models, world.optimizers, strict=True):
                        model.train()
                        model.state_dict()["into.weight"].sum()
                        assert optimizer is not None
                        optimizer.state_dict()
    for one, two in zip(*(world.models for world in worlds), strict=True):
        torch.testing.assert_close(list(one.parameters()), list(two.parameters()), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["rows", "level 3", "level 3, rows"])
def test_parameters_that_a_strategy_divides(name: str) -> None:
    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 14)).double()

    net, alone = layers(), layers()
    cf.shard(net[0], weight=("tp", None))
    cf.shard(net[2], weight=(None, "tp"))
    step = cf.compile(
        net, loss_fn=F.cross_entropy, optimizer=OPTIMIZERS["adamw"](net.parameters()), parallel_mode="semi_auto",
        mesh=(2, 2), device_num=4, clip_grad_norm=LIMIT, accumulate_steps=COUNT, enable_parallel_optimizer=True,
        parallel_optimizer_config=CONFIGS[name],
    )  # fmt: skip
    world, eager = LockstepWorld(step), OPTIMIZERS["adamw"](alone.parameters())
    for update in range(UPDATES):
        eager.zero_grad()
        for parts in given(2, update):
            world([part for part in parts for _ in range(2)])
            x, y = (torch.cat(each) for each in zip(*parts, strict=True))
            F.cross_entropy(alone(x), y).div(COUNT).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), LIMIT)
        eager.step()
    for model in world.models:
        torch.testing.assert_close(list(model.parameters()), list(alone.parameters()), rtol=1e-9, atol=1e-12)
    assert any(each.kind == "reduce_scatter" for each in step.lower_micro_batch(*parts[0]).collectives) == (
        name != "level 3"
    )


def test_sums_of_bf16_rows_keep_the_digits_that_were_sent() -> None:
    model = nn.Linear(12, 13, bias=False).to(torch.bfloat16)
    step = cf.compile(
        model, loss_fn=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), device_num=2,
        enable_parallel_optimizer=True, parallel_optimizer_config=ROWS, accumulate_steps=COUNT,
    )  # fmt: skip
    (batch, *_) = batches(1, 0)
    text = step.lower_micro_batch(batch[0].to(torch.bfloat16), batch[1]).text()
    assert "in  %weight.grad: f32[7,12] = gradient" in text


def test_a_sum_of_another_shape_is_not_forgotten() -> None:
    world = compiled(2, "sgd", ROWS, accumulate_steps=COUNT)
    world(given(2, 0)[0])
    held = world._ranks[1].held
    owner, found = held._held["into.weight"]
    held._held["into.weight"] = owner, torch.ones(24, 12, dtype=found.dtype)
    with pytest.raises(cf.CaptureError, match=r"\[24, 12\] for the gradient of into.weight.*\[12, 12\].*drop_micro"):
        world(given(2, 0)[1])


@pytest.mark.parametrize(
    ("rows", "peaks"), [(False, [36.0, 25.5]), (True, [16.9, 7.3])], ids=["whole sums", "sums of rows"]
)
def test_with_sums_of_rows_few_gradients_are_whole_at_once(rows: bool, peaks: list[float]) -> None:
    layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12)))
    found = []
    for level in (2, 3):
        step = cf.compile(
            layers, APART, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(layers.parameters(), lr=0.1), device_num=8,
            accumulate_steps=COUNT, enable_parallel_optimizer=True,
            parallel_optimizer_config={"level": level, "gradient_accumulation_shard": rows},
        )  # fmt: skip
        x = torch.randn(2, 256)
        found.append(step.lower_micro_batch(x, x).simulate("gloo-1gbit").peak_memory / (256 * 256 * 4))
    # Parameters, or rows; sums and gradients, of which each is as large as a weight, or an eighth of it.
    assert [round(peak, 1) for peak in found] == peaks
