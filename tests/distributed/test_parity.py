"""The same numbers as DistributedDataParallel, whatever is fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import commfuse_fx as cf
from tests.distributed.harness import Ranks
from tests.distributed.models_of_ranks import (
    MODELS,
    OFF,
    assert_parameters_close,
    assert_same,
    batch,
    compiled,
    digest,
    loss_fn_of,
    mlp,
    momentum,
    optimizer_for,
    plain_steps,
    xy,
)
from tests.logs import logged

FUSIONS: dict[str, dict[str, Any] | None] = {
    "auto": None,
    "off": OFF,
    "size": {"allreduce": {"mode": "size", "config": 1}},
    "index": {"allreduce": {"mode": "index", "config": [2, 4]}},
    "ids": None,
}


def _build(kind: str, fusion: str) -> torch.nn.Module:
    model = MODELS[kind]()
    if fusion == "ids":
        children = [module for module in model.modules() if list(module.parameters(recurse=False))]
        for number, module in enumerate(children):
            cf.set_comm_fusion(module, number % 3)
    return model


def match_ddp(kind: str, fusion: str) -> str:
    """Three steps as whole steps; with and without fusion also with the user's own optimizer."""
    reference = MODELS[kind]()
    make = optimizer_for(kind)
    expected = plain_steps(reference, make(reference), range(3), kind)

    whole = _build(kind, fusion)
    step = cf.compile(whole, FUSIONS[fusion], loss_fn=loss_fn_of(kind), optimizer=make(whole))
    for number in range(3):
        args, kwargs = batch(kind, number)
        step(*args, **kwargs)
    assert_parameters_close(whole, reference)
    if dist.get_rank() == 0:  # DistributedDataParallel sends rank 0's statistics to the others
        torch.testing.assert_close(dict(whole.named_buffers()), dict(reference.named_buffers()))
    if fusion not in ("auto", "off"):
        return digest(whole)

    own = _build(kind, fusion)
    optimizer = make(own)
    step = cf.compile(own, FUSIONS[fusion], loss_fn=loss_fn_of(kind), form="step")
    for number in range(3):
        args, kwargs = batch(kind, number)
        optimizer.zero_grad()
        step(*args, **kwargs)
        grads = {name: param.grad for name, param in own.named_parameters()}
        torch.testing.assert_close(grads, expected[number], rtol=1e-5, atol=1e-6)
        optimizer.step()
    assert_parameters_close(own, reference)
    return digest(whole) + digest(own)


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("kind", MODELS)
def test_training_matches_ddp(ranks: Ranks, kind: str, fusion: str) -> None:
    first, second = ranks.values(match_ddp, kind, fusion)
    assert first == second


def gradients(kind: str, fusion: str) -> dict[str, torch.Tensor]:
    model = _build(kind, fusion)
    args, kwargs = batch(kind, 0)
    cf.compile(model, FUSIONS[fusion], loss_fn=loss_fn_of(kind), form="step")(*args, **kwargs)
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def fused_is_bitwise(kind: str) -> None:
    plain = gradients(kind, "off")
    for fusion in [name for name in FUSIONS if name != "off"]:
        assert_same(gradients(kind, fusion), plain, fusion)


@pytest.mark.parametrize("kind", MODELS)
def test_fused_gradients_are_bitwise_those_of_the_unfused_graph(ranks: Ranks, kind: str) -> None:
    ranks.values(fused_is_bitwise, kind)


def accumulates() -> None:
    model, reference = mlp(), mlp()
    step = compiled(model)
    wrapped = torch.nn.parallel.DistributedDataParallel(reference)
    for number in range(2):
        step(*xy(number))
        x, y = xy(number)
        F.cross_entropy(wrapped(x), y).backward()
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad)


def test_gradients_accumulate_as_autograd_does(ranks: Ranks) -> None:
    ranks.values(accumulates)


def match_one_device(mean: bool) -> str:
    """full_batch: the sum (or mean) of the ranks' losses, each over its slice of the global batch."""
    model, alone = mlp(), mlp()
    step = compiled(model, momentum(model), full_batch=True, gradients_mean=mean)
    optimizer = momentum(alone)
    world = dist.get_world_size()
    for number in range(3):
        x, y = xy(number, rank=0, rows=8)
        loss = step(x, y)
        optimizer.zero_grad()
        (F.cross_entropy(alone(x), y) * (1 if mean else world)).backward()
        optimizer.step()
        mine = slice(dist.get_rank() * 8 // world, (dist.get_rank() + 1) * 8 // world)
        assert loss.shape == ()
        assert mine.stop - mine.start == 8 // world
    assert_parameters_close(model, alone)
    return digest(model)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("mean", [True, False])
def test_full_batch_equals_one_device(ranks: Ranks, mean: bool, size: int) -> None:
    assert len(set(ranks.values(match_one_device, mean, size=size))) == 1


def match_uneven() -> str:
    model, reference = mlp(), mlp()
    rows = 5 - 2 * dist.get_rank()
    plain_steps(reference, momentum(reference), range(3), rows=rows)
    step = compiled(model, momentum(model))
    for number in range(3):
        step(*xy(number, rows=rows))
    assert_parameters_close(model, reference)
    return digest(model)


def test_uneven_batches_are_averaged_as_ddp_does(ranks: Ranks) -> None:
    first, second = ranks.values(match_uneven)
    assert first == second


def start_from_rank_0(broadcast: bool, evaluate_first: bool) -> tuple[list[str], str, bool]:
    model = mlp(seed=dist.get_rank())
    reference = mlp(seed=0)
    plain_steps(reference, momentum(reference), range(2))
    with logged() as messages:
        step = compiled(model, momentum(model), parameter_broadcast=broadcast)
        if evaluate_first:
            model.eval()
            step(*xy(0))
            model.train()
        for number in range(2):
            step(*xy(number))
    same = all(
        torch.allclose(a, b, 1e-5, 1e-6) for a, b in zip(model.parameters(), reference.parameters(), strict=True)
    )
    return [text for text in messages if "parameters differ" in text], digest(model), same


@pytest.mark.parametrize("evaluate_first", [False, True])
def test_parameter_broadcast_starts_from_rank_0(ranks: Ranks, evaluate_first: bool) -> None:
    (warned, first, same), (_, second, _) = ranks.values(start_from_rank_0, True, evaluate_first)
    assert not warned
    assert first == second
    assert same


@pytest.mark.parametrize("evaluate_first", [False, True])
def test_ranks_that_start_apart_are_warned_about_once(ranks: Ranks, evaluate_first: bool) -> None:
    for warned, _, _ in ranks.values(start_from_rank_0, False, evaluate_first):
        assert len(warned) == 1
        assert "parameter_broadcast=True" in warned[0]


def hybrid() -> tuple[torch.Tensor, torch.Tensor]:
    model = mlp()
    for param in model[0].parameters():
        param.layerwise_parallel = True  # type: ignore[attr-defined]
    compiled(model, parallel_mode="hybrid_parallel")(*xy(0))
    alone = mlp()
    x, y = xy(0)
    F.cross_entropy(alone(x), y).backward()
    assert model[0].weight.grad is not None and model[2].weight.grad is not None
    torch.testing.assert_close(model[0].weight.grad, alone[0].weight.grad)
    return model[0].weight.grad, model[2].weight.grad


def test_layerwise_parallel_gradients_stay_local(ranks: Ranks) -> None:
    (local0, shared0), (local1, shared1) = ranks.values(hybrid)
    assert not torch.equal(local0, local1)
    assert torch.equal(shared0, shared1)


def on_four_ranks(kind: str, fusion: str) -> str:
    reference = MODELS[kind]()
    plain_steps(reference, momentum(reference), range(2), kind)
    model = _build(kind, fusion)
    step = cf.compile(model, FUSIONS[fusion], loss_fn=loss_fn_of(kind), optimizer=momentum(model), mesh=(2, 2))
    for number in range(2):
        args, kwargs = batch(kind, number)
        step(*args, **kwargs)
    assert_parameters_close(model, reference)
    return digest(model)


@pytest.mark.parametrize("fusion", ["auto", "off"])
@pytest.mark.parametrize("kind", ["mlp", "convnet"])
def test_four_ranks_on_a_two_by_two_mesh(ranks: Ranks, kind: str, fusion: str) -> None:
    assert len(set(ranks.values(on_four_ranks, kind, fusion, size=4))) == 1


def streamed_is_bitwise() -> list[str]:
    """A bucket of 20 MiB goes onto the wire in pieces; what arrives is what single messages bring."""
    digests: list[str] = []
    for fusion in (None, OFF):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(1024, 1024) for _ in range(5)]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(1024, 4))
        step = compiled(model, torch.optim.SGD(model.parameters(), lr=1e-2), comm_fusion=fusion)
        x, y = torch.randn(4, 1024), torch.randint(0, 4, (4,))
        text = step.lower(x, y).text()
        assert ("{sends bucket.0" in text) == (fusion is None)
        with step.record_communication() as timeline:
            for _ in range(2):
                step(x + dist.get_rank(), y)
        if fusion is None:
            assert sum(span.name.startswith("bucket.0/in_place.") for span in timeline.steps[-1]) >= 2
        digests.append(digest(model))
    return digests


def test_a_bucket_sent_in_pieces_gives_the_same_bits(ranks: Ranks) -> None:
    (streamed, plain), other = ranks.values(streamed_is_bitwise)
    assert streamed == plain
    assert other == [streamed, plain]
