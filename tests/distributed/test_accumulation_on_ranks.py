"""Several calls for one update on real ranks, against DistributedDataParallel with no_sync()."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
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
    convnet,
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

COUNT, STEPS = 3, 2
LIMIT = 0.02

Make = Callable[[nn.Module], torch.optim.Optimizer]
own = by_class(Own, lr=0.05, momentum=0.9)


def ddp_steps(model: nn.Module, make: Make, kind: str, limit: float | None = None, **options: Any) -> nn.Module:
    wrapped, optimizer = DistributedDataParallel(model, **options), make(model)
    for number in range(COUNT * STEPS):
        is_last = number % COUNT == COUNT - 1
        with nullcontext() if is_last else wrapped.no_sync():
            (eager_loss(wrapped, kind, *batch(kind, number)) / COUNT).backward()
        if is_last:
            if limit is not None:
                clip(optimizer, limit)
            optimizer.step()
            optimizer.zero_grad()
    return model


def train(model: nn.Module, make: Make, kind: str, **options: Any) -> nn.Module:
    step = cf.compile(model, loss_fn=loss_fn_of(kind), optimizer=make(model), accumulate_steps=COUNT, **options)
    for number in range(COUNT * STEPS):
        args, kwargs = batch(kind, number)
        step(*args, **kwargs)
    step.synchronize()
    assert step.steps == STEPS
    return model


PLANS: dict[str, dict[str, Any]] = {
    "default": {},
    "unfused": {"comm_fusion": OFF},
    "optimal": {"comm_fusion": OPTIMAL, "cluster": "gloo-1gbit"},
    "across steps": ACROSS_STEPS,
}


def sharded(**config: Any) -> dict[str, Any]:
    config = {"parallel_optimizer_threshold": 1, **config}
    return {"enable_parallel_optimizer": True, "parallel_optimizer_config": config}


SHARDED = sharded(pad=True)
OTHERS = {
    "sums of rows": sharded(pad=True, gradient_accumulation_shard=True),
    "rows alone": sharded(pad=True, level=3),
    "rows alone, sums of rows": sharded(pad=True, level=3, gradient_accumulation_shard=True),
    "sums of owners": sharded(mode="broadcast", gradient_accumulation_shard=True),
}


def matches_ddp(kind: str) -> str:
    plain, clipped = (ddp_steps(MODELS[kind](), momentum, kind, limit) for limit in (None, LIMIT))
    found = [train(MODELS[kind](), momentum, kind, **options) for options in (*PLANS.values(), SHARDED)]
    for model in found:
        assert_parameters_close(model, plain)
    for options in ({}, SHARDED):
        assert_parameters_close(train(MODELS[kind](), momentum, kind, clip_grad_norm=LIMIT, **options), clipped)
    return digest(found[0])


def shares_updates_otherwise(*ways: str) -> None:
    want = ddp_steps(MODELS["mlp"](), momentum, "mlp", LIMIT)
    for way in ways:
        assert_parameters_close(train(MODELS["mlp"](), momentum, "mlp", clip_grad_norm=LIMIT, **OTHERS[way]), want)


def test_other_ways_to_share_updates_match_ddp(ranks: Ranks) -> None:
    ranks.values(shares_updates_otherwise, *OTHERS, size=3)


def goes_on_from_checkpoints(folder: str) -> None:
    """One that another way to share updates has written, and again between micro-batches, whose sums are forgotten."""
    for one, two in (("sums of rows", "sums of owners"), ("rows alone, sums of rows", "rows alone")):
        model, other = mlp(), mlp(seed=1)
        step, again = (
            cf.compile(each, loss_fn=F.cross_entropy, optimizer=momentum(each), accumulate_steps=2, **OTHERS[chosen])
            for each, chosen in ((model, one), (other, two))
        )
        for call in range(4):
            step(*xy(call))
        place = f"{folder}/{one}"
        step.save(place)
        want = [float(step(*xy(call))) for call in range(4, 8)]
        for calls in (0, 1):
            for call in range(calls):
                again(*xy(call))
            again.load(place)
            assert again.steps == 2
            torch.testing.assert_close([float(again(*xy(call))) for call in range(4, 8)], want)
            torch.testing.assert_close(dict(other.state_dict()), dict(model.state_dict()), rtol=1e-5, atol=1e-6)


def test_checkpoints_of_one_way_to_share_updates_load_in_another(ranks: Ranks, tmp_path: Path) -> None:
    ranks.values(goes_on_from_checkpoints, str(tmp_path))


@pytest.mark.parametrize(("kind", "size"), [*((kind, 2) for kind in MODELS), ("mlp", 3)])
def test_training_matches_ddp(ranks: Ranks, kind: str, size: int) -> None:
    assert len({*ranks.values(matches_ddp, kind, size=size)}) == 1


def has_the_bits_of_ddp() -> None:
    for limit in (None, LIMIT):
        reference = snapshot(ddp_steps(MODELS["mlp"](), own, "mlp", limit))[0]
        for name, options in PLANS.items():
            model = train(MODELS["mlp"](), own, "mlp", clip_grad_norm=limit, **options)
            assert_same(snapshot(model)[0], reference, f"{name}, clipped to {limit}")


def test_gradients_handed_to_the_optimizer_have_the_bits_of_ddp(ranks: Ranks) -> None:
    run_soon(ranks, has_the_bits_of_ddp)


def sends_buffers() -> None:
    """DDP sends rank 0's statistics in the forwards of backwards that reduce; a step in these calls."""
    model, reference = convnet(), ddp_steps(convnet(), momentum, "convnet")
    train(model, momentum, "convnet", broadcast_buffers=True)
    assert_parameters_close(model, reference)


def test_buffers_are_sent_where_gradients_are(ranks: Ranks) -> None:
    ranks.values(sends_buffers)


def begins_with_values_of_rank_0() -> str:
    model = mlp(seed=dist.get_rank())
    train(model, momentum, "mlp", parameter_broadcast=True)
    assert_parameters_close(model, ddp_steps(mlp(seed=dist.get_rank()), momentum, "mlp"))
    return digest(model)


def test_rank_0_sends_its_parameters_before_the_first_micro_batch(ranks: Ranks) -> None:
    one, other = ranks.values(begins_with_values_of_rank_0)
    assert one == other


def sends_nothing_early() -> list[int]:
    model = mlp()
    step = cf.compile(model, loss_fn=F.cross_entropy, optimizer=momentum(model), accumulate_steps=COUNT)
    with step.record_communication() as timeline:
        for number in range(2 * COUNT):
            step(*xy(number))
    return [number for number, spans in enumerate(timeline.steps) if spans]


def test_nothing_is_sent_before_the_last_micro_batch(ranks: Ranks) -> None:
    for steps in ranks.values(sends_nothing_early):
        assert steps == [COUNT - 1, 2 * COUNT - 1]


def takes_batches_of_several_sizes() -> str:
    """Other sizes from call to call, and on every rank."""
    model, reference = mlp(), mlp()
    step = cf.compile(model, loss_fn=F.cross_entropy, optimizer=momentum(model), accumulate_steps=2)
    wrapped, optimizer = DistributedDataParallel(reference), momentum(reference)
    for number in range(6):
        x, y = xy(number, rows=4 + 2 * (number % 3) + dist.get_rank())
        step(x, y)
        with wrapped.no_sync() if number % 2 == 0 else nullcontext():
            (F.cross_entropy(wrapped(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert_parameters_close(model, reference)
    return digest(model)


def test_batches_of_several_sizes(ranks: Ranks) -> None:
    one, other = ranks.values(takes_batches_of_several_sizes)
    assert one == other


def tries_plans(winner: str) -> list[str]:
    with quickly(winner):
        twins = Twins(shared={"accumulate_steps": 2})
        twins.settle()
        twins.check()
    return twins.tried()


@pytest.mark.parametrize("winner", ["", "across steps"])
def test_training_is_the_same_whatever_plan_is_tried(ranks: Ranks, winner: str) -> None:
    one, other = ranks.values(tries_plans, winner)
    assert one == other and len(one) > 2 and one[-1].endswith(" stays")


def goes_on_after_a_failure(failing: int, options: dict[str, Any]) -> tuple[str, list[str]]:
    """Rank 1 fails in one call; both go on until each has had all of its batches."""
    model = mlp()
    step = cf.compile(model, loss_fn=F.cross_entropy, optimizer=momentum(model), accumulate_steps=COUNT, **options)
    errors, number, calls = [], 0, 0
    while number < COUNT * STEPS:
        x, y = xy(number)
        try:
            step(x, y + 9 if dist.get_rank() and calls == failing else y)
            number += 1
        except (IndexError, cf.PeerFailedError) as error:
            errors.append(type(error).__name__)
        calls += 1
    assert_parameters_close(model, ddp_steps(mlp(), momentum, "mlp"))
    assert step.steps == STEPS
    return digest(model), errors


@pytest.mark.parametrize(
    ("failing", "options"),
    [*((failing, {}) for failing in range(COUNT + 1)), (1, OTHERS["sums of rows"])],
    ids=[*map(str, range(COUNT + 1)), "sums of rows"],
)
def test_a_micro_batch_that_fails_on_one_rank_is_not_lost_and_not_counted_twice(
    ranks: Ranks, failing: int, options: dict[str, Any]
) -> None:
    one, other = (each.value for each in run_soon(ranks, goes_on_after_a_failure, failing, options))
    assert one[0] == other[0]
    assert one[1] == ["PeerFailedError"] and other[1] == ["IndexError"]


def divided(options: dict[str, Any]) -> None:
    model = mlp()
    reference, size = copy.deepcopy(model), dist.get_world_size()
    cf.shard(model[0], weight=("tp", None), bias=("tp",))
    cf.shard(model[2], weight=(None, "tp"))
    step = cf.compile(
        model,
        loss_fn=F.cross_entropy,
        optimizer=momentum(model),
        parallel_mode="semi_auto",
        accumulate_steps=2,
        clip_grad_norm=LIMIT,
        **options,
    )
    optimizer = momentum(reference)
    for number in range(4):
        x, y = (torch.cat(each) for each in zip(*(xy(number, rank) for rank in range(size)), strict=True))
        if options["mesh"][0] == 1:
            step(x, y)
        else:
            step(*xy(number))
        (F.cross_entropy(reference(x), y) / 2).backward()
        if number % 2:
            clip(optimizer, LIMIT)
            optimizer.step()
            optimizer.zero_grad()
    assert_parameters_close(model, reference)


@pytest.mark.parametrize("options", [{"mesh": (1, 2), "full_batch": True}, {"mesh": (2, 1)}], ids=["parts", "rows"])
def test_divided_steps(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks.values(divided, options)
