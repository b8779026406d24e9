"""bf16 compute under autocast with float32 parameters: what ranks that share the updates gather, hold and train."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import commfuse_fx as cf
from commfuse_fx.ir import info
from commfuse_fx.passes.distribute.cast_before_gather import CastBeforeGather
from commfuse_fx.virtual.virtual_world import LockstepWorld

WORDS, STEPS = 40, 5
CONFIGS: dict[str, dict[str, Any]] = {
    "level 1": {},
    "level 2": {"level": 2},
    "level 3": {"level": 3},
    "level 3, some ranks": {"level": 3, "optimizer_weight_shard_size": 1},
    "owners": {"mode": "broadcast"},
}
APART = {"openstate": False}


class Words(nn.Module):
    """A tied embedding, of which the lookup takes float32 and the head bf16, norms in float32, and layers in bf16."""

    def __init__(self, inside: bool = True, again: bool = False, width: int = 33) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.again = inside, again
        self.words = nn.Embedding(WORDS, 16)
        self.up, self.norm, self.down = nn.Linear(16, width), nn.LayerNorm(width), nn.Linear(width, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.words.weight

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.down(F.gelu(self.norm(self.up(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.inside else nullcontext():
            x = self.words(x)
            x = x + (checkpoint(self.layers, x, use_reentrant=False) if self.again else self.layers(x))
            return self.head(x)


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def batches(ranks: int, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(step)
    x, y = (torch.randint(0, WORDS, (ranks * 4, 6), generator=made) for _ in range(2))
    return list(zip(x.chunk(ranks), y.chunk(ranks), strict=True))


def world_of(
    config: dict[str, Any] | None, model: nn.Module | None = None, ranks: int = 2, **more: Any
) -> LockstepWorld:
    model = Words() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    if config is not None:
        config = {"parallel_optimizer_threshold": 0, "pad": True, **config}
        more |= {"enable_parallel_optimizer": True, "parallel_optimizer_config": config}
    step = cf.compile(model, loss_fn=loss_fn, optimizer=optimizer, device_num=ranks, global_rank=0, **more)
    return LockstepWorld(step)


def trained(world: LockstepWorld, around: bool = False) -> list[torch.Tensor]:
    """The parameters of all ranks after some steps. around: whether autocast is on where the step is called."""
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16) if around else nullcontext():
            world(batches(len(world.models), step))
    return [param.detach().clone() for model in world.models for param in model.parameters()]


def on_one_device(ranks: int, count: int = 1, clip: float | None = None) -> nn.Module:
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(STEPS):
        for x, y in batches(ranks, step):
            (loss_fn(model(x), y) / (ranks * count)).backward()
        if step % count == count - 1:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("around", [False, True], ids=["in the model", "around the step"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_training_is_that_of_plain_data_parallel_and_of_one_device(config: dict[str, Any], around: bool) -> None:
    found, plain = (trained(world_of(each, Words(inside=not around)), around) for each in (config, None))
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    for one, other in zip(found, [*on_one_device(2).parameters()] * 2, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3)


@pytest.mark.parametrize("rows", [False, True], ids=["whole sums", "sums of rows"])
def test_micro_batches_and_clipping(rows: bool) -> None:
    config = {"level": 3, "gradient_accumulation_shard": rows}
    found = trained(world_of(config, ranks=3, accumulate_steps=2, clip_grad_norm=0.5))
    for one, other in zip(found, [*on_one_device(3, 2, 0.5).parameters()] * 3, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3)


def test_parameters_that_a_strategy_divides() -> None:
    def strategy(config: dict[str, Any] | None) -> list[torch.Tensor]:
        model = Words(width=34)
        cf.shard(model.up, weight=("tp", None), bias=("tp",))
        cf.shard(model.down, weight=(None, "tp"))
        world = world_of(config, model, ranks=4, parallel_mode="semi_auto", mesh=(2, 2))
        for step in range(STEPS):
            world([part for part in batches(2, step) for _ in range(2)])
        return [param.detach().clone() for each in world.models for param in each.parameters()]

    for one, other in zip(strategy({"level": 3}), strategy(None), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("again", [False, True], ids=["", "activation checkpointing"])
@pytest.mark.parametrize("fusion", [None, APART], ids=["fused", "apart"])
def test_casts_that_are_gathered_have_the_bits_of_those_of_what_is_gathered(
    fusion: Any, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gathered() -> tuple[list[torch.Tensor], dict[torch.dtype, int]]:
        world = world_of({"level": 3}, Words(again=again), ranks=3, comm_fusion=fusion)
        sent: Counter[torch.dtype] = Counter()
        for each in world.step.lower(*batches(1, 0)[0]).collectives:
            sent[each.dtype] += each.bytes if each.kind == "all_gather" else 0
        return trained(world), dict(sent)

    found, sent = gathered()
    monkeypatch.setattr(CastBeforeGather, "__call__", lambda self, program: False)
    want, all_sent = gathered()
    assert all(map(torch.equal, found, want))
    # Layers, their weights for the backward (with checkpointing a bias as well), and the tied weight for that of the
    # head. Its lookup takes float32, as the norm does.
    cast = 4 * (4 * 16 * 33 + 16 + 33 + WORDS * 16 + (33 if again else 0))
    assert sent == {torch.float32: all_sent[torch.float32] - cast, torch.bfloat16: cast // 2}


@pytest.mark.parametrize("count", [1, 2])
def test_an_evaluation_gathers_casts_too(count: int) -> None:
    world = world_of({"level": 3}, accumulate_steps=count)
    for step in range(STEPS):
        world(batches(2, step))
    for model in world.models:
        model.eval()
    losses = [float(result.loss) for result in world(batches(2, STEPS))]
    running = world._running
    assert running is not None
    sent = {info(node).collective.dtype for node in running.program.collectives()}
    assert sent == {torch.float32, torch.bfloat16}
    alone = on_one_device(2, count)
    assert losses == pytest.approx([loss_fn(alone(x), y).item() for x, y in batches(2, STEPS)], rel=1e-3)


def test_masters_and_states_are_float32_rows() -> None:
    world = world_of({"level": 3}, ranks=4)
    trained(world)
    shards = world._ranks[0].shards
    assert shards is not None
    held = [tensor for each in shards._divided for tensor in (each.part, *each.state.values())]
    assert held and all(tensor.dtype == torch.float32 for tensor in held)
    params = [param for param in Words().parameters() if param.requires_grad]
    (found,) = [each for each in world.step.lower(*batches(1, 0)[0]).explain().memory.held if each.kind == "parameters"]
    padded = sum(-(-param.shape[0] // 4) * 4 * param[0].numel() for param in params)
    frozen = sum(param.numel() for param in Words().frozen.parameters())
    assert found.per_rank == 4 * (padded // 4 + frozen)


def test_no_cast_of_a_whole_parameter_is_kept_for_the_backward() -> None:
    layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12)))

    def peak(level: int) -> float:
        config = {"level": level}
        step = cf.compile(
            layers, APART, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(layers.parameters(), lr=0.1), device_num=8,
            enable_parallel_optimizer=True, parallel_optimizer_config=config,
        )  # fmt: skip
        x = torch.randn(2, 256)
        with torch.autocast("cpu", torch.bfloat16):
            return step.lower(x, x).simulate("gloo-1gbit").peak_memory / (256 * 256 * 4)

    # Parameters, half of their bytes for casts, and some gradients; rows, and three or four of both.
    assert [round(peak(level), 1) for level in (2, 3)] == [19.7, 5.8]


def test_a_step_with_bf16_parameters_gathers_them_as_they_are() -> None:
    model = Words(inside=False).to(torch.bfloat16)
    world = world_of({"level": 3}, model)
    trained(world)
    sent = {each.dtype for each in world.step.lower(*batches(1, 0)[0]).collectives if each.kind == "all_gather"}
    assert sent == {torch.bfloat16}
