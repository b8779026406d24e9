"""Ranks whose optimizers have other numbers hear of it in the vote: a warning, or an error where ranks hold parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.runtime.execute.cuda_graphs.step_graphs import FIRST
from commfuse_fx.runtime.ranks.agreement import Agreement
from tests.distributed.harness import Ranks
from tests.distributed.models_of_ranks import assert_same, compiled, digest, mlp, snapshot, xy
from tests.logs import logged
from tests.recorders import recorded

DIVIDED: dict[str, Any] = {
    "enable_parallel_optimizer": True,
    "parallel_optimizer_config": {"parallel_optimizer_threshold": 0},
}


def odd() -> bool:
    return dist.get_rank() == 1


def groups(model: nn.Sequential, **options: Any) -> torch.optim.Optimizer:
    given = [{"params": list(model[0].parameters())}, {"params": list(model[2:].parameters()), "lr": 0.02}]
    return torch.optim.AdamW(given, **{"lr": 0.01, **options})


@contextmanager
def exchanges() -> Iterator[list[int]]:
    found = [0]
    from_all = Agreement.from_all

    def counting(self: Agreement, mine: Any) -> list[Any]:
        found[0] += 1
        return from_all(self, mine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agreement, "from_all", counting)
        yield found


def about_numbers(messages: list[str]) -> list[str]:
    return [text for text in messages if "param group" in text]


def drifts() -> tuple[list[list[str]], int]:
    """What each of some steps warns of, and how often ranks exchange their numbers."""
    model = mlp()
    optimizer = groups(model)
    step = compiled(model, optimizer)
    said = []

    def run(number: int) -> None:
        with logged() as messages:
            step(*xy(number))
        said.append(about_numbers(messages))

    with exchanges() as found:
        run(0)
        optimizer.param_groups[1]["lr"] = 0.002 if odd() else 0.02  # a plateau of the local loss
        run(1)
        for number in range(2, 5):
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            run(number)
        optimizer.param_groups[0]["betas"] = (0.8 if odd() else 0.9, 0.999)
        optimizer.param_groups[0]["weight_decay"] = 0 if odd() else 0.0
        optimizer.param_groups[1]["weight_decay"] = np.float64(0.2 if odd() else 0.1)
        run(5)
        run(6)
    return said, found[0]


def test_numbers_that_drift_are_warned_of_once(ranks: Ranks) -> None:
    for said, count in ranks.values(drifts):
        assert [len(each) for each in said] == [0, 1, 0, 0, 0, 1, 0]
        assert "lr of param group 1 is 0.02 on rank 0 and 0.002 on rank 1: replicas" in said[1][0]
        assert "ReduceLROnPlateau" in said[1][0]
        assert "betas of param group 0 is [0.9, 0.999] on rank 0 and [0.8, 0.999] on rank 1" in said[5][0]
        assert "weight_decay of param group 1 is 0.1 on rank 0 and 0.2 on rank 1" in said[5][0]
        assert count == 2


def agree() -> tuple[list[str], int, str]:
    """A schedule of all ranks, and what is each rank's own: a group of parameters that no other rank has."""
    model = mlp()
    optimizer = groups(model, betas=[0.9, 0.99] if odd() else (0.9, 0.99))
    optimizer.param_groups[1]["weight_decay"] = np.float64(0.1) if odd() else 0.1
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=9)
    step = compiled(model, optimizer)
    with logged() as messages, exchanges() as found:
        for number in range(4):
            step(*xy(number))
            schedule.step()
        own = mlp()
        for param in own[0].parameters():
            param.layerwise_parallel = True  # type: ignore[attr-defined]
        other = groups(own)
        other.param_groups[0]["lr"] = 0.1 + dist.get_rank()
        second = compiled(own, other, parallel_mode="hybrid_parallel")
        second(*xy(0))
    return about_numbers(messages), found[0], digest(model)


def test_schedules_and_own_parameters_say_nothing(ranks: Ranks) -> None:
    found = ranks.values(agree)
    assert [each[:2] for each in found] == [([], 0)] * 2
    assert found[0][2] == found[1][2]


def tensors_and_graphs() -> list[str]:
    """Learning rates that are tensors, changed in place, in a step that is captured."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.01), foreach=True)
    step = compiled(model, optimizer)
    recorder = recorded(step)
    with logged() as messages:
        for number in range(FIRST + 2):
            step(*xy(number))
        assert sum(recorder.replays)
        optimizer.param_groups[0]["lr"].mul_(1 + dist.get_rank())
        step(*xy(0))
    return about_numbers(messages)


def test_tensors_and_captured_steps(ranks: Ranks) -> None:
    for (said,) in ranks.values(tensors_and_graphs):
        assert "lr of param group 0 is 0.00999" in said and "0.0199" in said


def divided(kind: str) -> tuple[str, bool]:
    """What a rank with another weight decay leads to, and whether ranks go on alike afterwards."""
    model = mlp()
    if kind == "step":
        optimizer: Any = groups(model)
        step = compiled(model, optimizer, **DIVIDED)
    else:
        options = {"parallel_optimizer_config": DIVIDED["parallel_optimizer_config"]}
        level = {"parallel_optimizer_config": {"parallel_optimizer_threshold": 0, "level": 3}}
        made = cf.compile(model, **(DIVIDED | level if kind == "level 3" else {}))
        options = {} if kind == "level 3" else options
        optimizer = cf.ShardedOptimizer(made, torch.optim.AdamW, lr=0.01, **options)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            F.cross_entropy(made(x), y).backward()
            optimizer.step()

    step(*xy(0))
    before = snapshot(model)
    optimizer.param_groups[0]["weight_decay"] = 0.5 if odd() else 0.1
    try:
        step(*xy(1))
        said = ""
    except cf.PlanMismatchError as error:
        said = str(error)
    assert_same(snapshot(model), before)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    step(*xy(2))
    return said, digest(model)


@pytest.mark.parametrize("kind", ["step", "sharded", "level 3"])
def test_divided_parts_do_not_follow_other_numbers(ranks: Ranks, kind: str) -> None:
    found = ranks.values(divided, kind)
    for said, _ in found:
        assert said.startswith("weight_decay of param group 0 is 0.1 on rank 0 and 0.5 on rank 1, and each rank")
    assert found[0][1] == found[1][1]
