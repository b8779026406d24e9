"""Ranks vote on every call that updates and every backward that reduces, also where a plan sends nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.runtime.execute.cuda_graphs.step_graphs import FIRST
from commfuse_fx.runtime.ranks.agreement import Agreement
from tests.distributed.harness import Ranks, hurry, run_soon
from tests.distributed.models_of_ranks import assert_same, compiled, momentum, snapshot, xy
from tests.distributed.test_failures import Interruptible, _script
from tests.recorders import recorded

Call = Callable[[torch.Tensor], Any]


def net(layerwise: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    for param in made.parameters():
        param.layerwise_parallel = layerwise  # type: ignore[attr-defined]
    return made


def x_of(number: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(number))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Averaged(torch.optim.SGD):
    """Not a class that the compiler knows."""


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer | None, **options: Any) -> Any:
    return cf.compile(model, loss_fn=F.mse_loss, optimizer=optimizer, **options)


def in_step(model: nn.Module, step: Any) -> tuple[nn.Module, Call]:
    return model, lambda x: step(x, x[:, :4])


def auto(optimizer: Any = sgd, **options: Any) -> tuple[nn.Module, Call]:
    model = net()
    given = None if optimizer is None else optimizer(model)
    return in_step(model, step_of(model, given, parallel_mode="auto", full_batch=True, **options))


def own_parameters(graphs: bool = False, **options: Any) -> tuple[nn.Module, Call]:
    """Each rank has its own: none is reduced."""
    model = net(layerwise=True)
    step = step_of(model, sgd(model), parallel_mode="hybrid_parallel", **options)
    if graphs:
        recorded(step)
    return in_step(model, step)


def in_module(model: nn.Module, made: Any, optimizer: Any, syncs: bool = True) -> tuple[nn.Module, Call]:
    def call(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        with nullcontext() if syncs else made.no_sync():
            F.mse_loss(made(x), x[:, :4]).backward()
        optimizer.step()

    return model, call


def own_module(syncs: bool = True, **options: Any) -> tuple[nn.Module, Call]:
    model = net(layerwise=True)
    made = cf.compile(model, parallel_mode="hybrid_parallel", **options)
    return in_module(model, made, sgd(model), syncs)


def own_module_sharded() -> tuple[nn.Module, Call]:
    model = net(layerwise=True)
    made = cf.compile(model, parallel_mode="hybrid_parallel")
    return in_module(model, made, cf.ShardedOptimizer(made, torch.optim.SGD, lr=0.1))


class Spare(nn.Module):
    """Learns nothing of its loss; its input does."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(6, 8).tanh()


def unused_module() -> tuple[nn.Module, Call]:
    model = Spare()
    made = cf.compile(model)
    return model, lambda x: made(x.clone().requires_grad_()).sum().backward()


def micro_batches() -> tuple[nn.Module, Call]:
    """Of which the second one updates."""
    return own_parameters(accumulate_steps=2)


def evaluates() -> tuple[nn.Module, Call]:
    model, call = auto()
    model.eval()
    return model, call


def alone() -> tuple[nn.Module, Call]:
    model = net()
    return in_step(model, step_of(model, sgd(model), parallel_mode="stand_alone"))


VOTING: dict[str, Callable[[], tuple[nn.Module, Call]]] = {
    "auto": auto,
    "auto, gradients alone": lambda: auto(None),
    "auto, another optimizer": lambda: auto(lambda model: Averaged(model.parameters(), lr=0.1)),
    "auto, broadcast": lambda: auto(parameter_broadcast=True),
    "own parameters": own_parameters,
    "own parameters, captured": lambda: own_parameters(graphs=True),
    "own module": own_module,
    "own module, dynamo": lambda: own_module(capture="dynamo"),
    "own module, sharded optimizer": own_module_sharded,
    "unused module": unused_module,
}
SILENT: dict[str, Callable[[], tuple[nn.Module, Call]]] = {
    "no_sync": lambda: own_module(syncs=False),
    "no_sync, dynamo": lambda: own_module(syncs=False, capture="dynamo"),
    "evaluates": evaluates,
    "alone": alone,
}


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many votes are cast in the block."""
    found = [0]
    cast = Agreement.cast

    def counting(self: Agreement, *args: Any) -> None:
        found[0] += 1
        cast(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agreement, "cast", counting)
        yield found


def votes_of_a_call() -> dict[str, int]:
    """When the first call is over."""
    found = {}
    for name, make in {**VOTING, **SILENT}.items():
        _, call = make()
        for number in range(before := FIRST + 1 if "captured" in name else 1):
            call(x_of(number))
        with counted() as votes:
            call(x_of(before))
        found[name] = votes[0]
    _, call = micro_batches()
    for number in range(4):
        with counted() as votes:
            call(x_of(number))
        found[f"micro-batch {number}"] = votes[0]
    return found


def test_what_changes_something_votes_and_nothing_else_does(ranks: Ranks) -> None:
    for found in ranks.values(votes_of_a_call):
        assert [name for name in VOTING if not found[name]] == []
        assert [name for name in SILENT if found[name]] == []
        assert [found[f"micro-batch {number}"] for number in range(4)] == [0, 1, 0, 1]


def a_bad_batch() -> dict[str, list[str]]:
    """On rank 1, in a first step and in a later one. Nothing changes on any rank, and they go on."""
    found: dict[str, list[str]] = {}
    for name, make in VOTING.items():
        model, call = make()
        for number, when in enumerate((0, FIRST + 1 if "captured" in name else 1)):
            for good in range(when):
                call(x_of(good))
            before = snapshot(model)
            try:
                call(x_of(9)[:, : 8 - dist.get_rank()])
            except Exception as error:
                found.setdefault(name, []).append(type(error).__name__)
            assert_same(snapshot(model), before, f"{name}, {number}")
        call(x_of(8))
    return found


def test_a_rank_that_fails_is_heard_of(ranks: Ranks) -> None:
    one, other = run_soon(ranks, a_bad_batch)
    assert one.ok, one.details
    assert other.ok, other.details
    assert one.value == {name: ["PeerFailedError"] * 2 for name in VOTING}
    assert all(error.endswith("RuntimeError") for errors in other.value.values() for error in errors)
    assert other.value.keys() == one.value.keys()


def skips(kind: str) -> str:
    """Rank 1 leaves out a batch."""
    _, call = VOTING[kind]()
    for number in range(2):
        call(x_of(number))
    hurry(6.0)
    try:
        for number in range(2 + 2 * (dist.get_rank() == 0)):
            call(x_of(number))
    except cf.CollectiveError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["auto", "own module"])
def test_a_rank_that_skips_a_batch_is_missed(ranks: Ranks, kind: str) -> None:
    said, other = ranks.values(skips, kind)
    assert "no vote has come from rank 1" in said and not other


def dies(kind: str) -> None:
    _, call = VOTING[kind]()
    call(x_of(0))
    if dist.get_rank() == 1:
        os._exit(3)
    call(x_of(1))


@pytest.mark.parametrize("kind", ["auto, gradients alone", "own parameters", "own module, dynamo"])
def test_a_rank_that_dies_is_missed(ranks: Ranks, kind: str) -> None:
    one, other = run_soon(ranks, dies, kind)
    assert other.died == 3
    assert one.error.startswith("CollectiveError: "), one.details
    assert "no vote has come from rank 1" in one.error


def leaves_after_its_vote() -> list[str]:
    """Rank 1 fails in the backward. The other rank cannot know yet, and updates."""
    model = Interruptible()
    for param in model.parameters():
        param.layerwise_parallel = True  # type: ignore[attr-defined]
    step = compiled(model, momentum(model), parallel_mode="hybrid_parallel")
    step(*xy(0))
    if dist.get_rank() == 1:
        _script.extend(["pass", "raise"])
    errors = []
    for number in (1, 2):
        try:
            step(*xy(number))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    return errors


def test_a_rank_that_leaves_after_its_vote_is_heard_of_in_the_next_one(ranks: Ranks) -> None:
    one, other = run_soon(ranks, leaves_after_its_vote)
    assert one.ok and other.ok, one.details + other.details
    (said,) = one.value
    assert said.startswith("CollectiveError") and "rank 1: MemoryError: no room left" in said
    assert other.value[0].startswith("MemoryError") and "no longer at the same place" in other.value[1]
