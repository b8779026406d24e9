"""Ranks that do not run the same program learn it from their votes, on every rank alike."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commfuse_fx as cf
from tests.capture.test_hash_order import NAMES, Branches, Sum
from tests.distributed.harness import Ranks, run_soon
from tests.distributed.models_of_ranks import OFF, adamw, assert_same, compiled, digest, mlp, momentum, snapshot, xy


def differ_in(what: str) -> None:
    odd = dist.get_rank() == 1
    model = mlp(width=36 if odd and what == "width" else 32, extra=odd and what == "extra relu")
    fusion = OFF if odd and what == "fusion" else None
    optimizer = (momentum if odd and what == "optimizer" else adamw)(model)
    before = snapshot(model, optimizer)
    step = compiled(model, optimizer, comm_fusion=fusion)
    try:
        step(*xy(0))
    finally:
        assert_same(snapshot(model, optimizer), before)


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("extra relu", "in  %4.weight", "in  %5.weight"),
        ("width", "f32[32,16]", "f32[36,16]"),
        ("fusion", "# comm_fusion.openstate: True", "# comm_fusion.openstate: False"),
        ("optimizer", "# optimizer: AdamW (adamw)", "# optimizer: SGD (sgd)"),
    ],
)
def test_different_plans_are_quoted_on_every_rank(ranks: Ranks, what: str, first: str, second: str) -> None:
    for outcome in run_soon(ranks, differ_in, what):
        assert outcome.error.startswith("PlanMismatchError: "), outcome.details
        lines = {line.split(":")[0].strip(): line for line in outcome.error.splitlines()}
        assert first in lines["rank 0"]
        assert second in lines["rank 1"]


def full_batches_differ() -> None:
    model = mlp()
    before = snapshot(model)
    try:
        compiled(model, momentum(model), full_batch=True)(*xy(0, rows=8 + 4 * dist.get_rank()))
    finally:
        assert_same(snapshot(model), before)


class Gathering(nn.Module):
    """Compares its rows with those of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out - cf.ops.all_gather(out).mean(0)


def gathered_batches_differ() -> None:
    model = Gathering()
    compiled(model, momentum(model))(*xy(0, rows=4 + dist.get_rank()))


@pytest.mark.parametrize("function", [full_batches_differ, gathered_batches_differ])
def test_batch_sizes_that_must_agree_and_do_not(ranks: Ranks, function: Any) -> None:
    for outcome in run_soon(ranks, function):
        assert outcome.error.startswith("PlanMismatchError: "), outcome.details
        assert "rank 0: " in outcome.error
        assert "rank 1: " in outcome.error


def differ_after_a_step() -> None:
    """A new plan is compared as well."""
    model = mlp()
    step = compiled(model, momentum(model))
    step(*xy(0))
    if dist.get_rank() == 1:
        model[0].bias.requires_grad_(False)
    before = snapshot(model)
    try:
        step(*xy(1))
    finally:
        assert_same(snapshot(model), before)


def test_plans_are_compared_in_every_step(ranks: Ranks) -> None:
    for outcome in run_soon(ranks, differ_after_a_step):
        assert outcome.error.startswith("PlanMismatchError: "), outcome.details


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) * self.scale
        return out


def attributes_change() -> tuple[str, str]:
    """On one rank, then back, then on all; and one rank alone traces the same graph again."""
    model = Scaled()
    step = compiled(model, momentum(model))
    step(*xy(0))
    error = ""
    if dist.get_rank() == 1:
        model.scale = 2.0
    before = snapshot(model)
    try:
        step(*xy(1))
    except cf.PlanMismatchError as mismatch:
        error = str(mismatch)
    assert_same(snapshot(model), before)
    model.scale = 1.0
    step(*xy(1))
    model.scale = 3.0
    step(*xy(2))
    if dist.get_rank() == 1:
        step.retrace()
    step(*xy(3))
    return error, digest(model)


def test_an_attribute_that_changes_on_one_rank(ranks: Ranks) -> None:
    outcomes = run_soon(ranks, attributes_change)
    for outcome in outcomes:
        assert not outcome.error, outcome.details
        error = outcome.value[0]
        assert "compiled different plans" in error and "2.0" in error, error
    assert outcomes[0].value[1] == outcomes[1].value[1]


def two_steps(sort: str) -> tuple[list[str], str]:
    """Rank 1 once calls another compiled step than rank 0. Returns the errors, and a digest."""
    models = [mlp(), mlp()]
    steps = [compiled(models[0], momentum(models[0]))]
    if sort == "compiled by one rank" and dist.get_rank() == 1:
        other = mlp()
        compiled(other, momentum(other))
    steps.append(compiled(models[1], momentum(models[1])))
    if sort == "in between":
        for step in steps:
            step(*xy(0))
    before = [snapshot(model) for model in models]
    errors = []
    try:
        steps[1 if sort == "compiled by one rank" else dist.get_rank()](*xy(1))
    except cf.PlanMismatchError as error:
        errors.append(str(error))
    assert_same([snapshot(model) for model in models], before)
    steps[0](*xy(2))
    return errors, digest(models[0])


@pytest.mark.parametrize(
    ("sort", "first", "second"),
    [("at once", 1, 2), ("in between", 1, 2), ("compiled by one rank", 2, 3)],
)
def test_ranks_that_call_different_steps(ranks: Ranks, sort: str, first: int, second: int) -> None:
    """Even of equal models: their gradients are not to be mixed."""
    outcomes = run_soon(ranks, two_steps, sort)
    for outcome in outcomes:
        assert not outcome.error, outcome.details
        (error,) = outcome.value[0]
        assert f"rank 0: step {first}, of Sequential\n  rank 1: step {second}, of Sequential\n" in error
    assert outcomes[0].value[1] == outcomes[1].value[1]


def threads_of_steps() -> list[int]:
    counts = []
    for _ in range(3):
        model = mlp()
        compiled(model, momentum(model))(*xy(0))
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


def test_a_further_step_takes_no_threads(ranks: Ranks) -> None:
    for outcome in run_soon(ranks, threads_of_steps):
        assert outcome.value[1:] == outcome.value[:-1]


def orders_differ(kind: str) -> float:
    """Rank 1 iterates the other way round."""
    torch.manual_seed(0)
    order = NAMES if dist.get_rank() == 0 else NAMES[::-1]
    model = (Sum if kind == "sum" else Branches)(order)
    step = cf.compile(model, optimizer=momentum(model))
    batch = torch.randn(2, 3, 8)
    step(batch)
    return float(step(batch))


def test_ranks_that_iterate_in_other_orders(ranks: Ranks) -> None:
    first, second = run_soon(ranks, orders_differ, "branches")
    assert first.ok and second.ok, first.details + second.details
    assert first.value == second.value
    for outcome in run_soon(ranks, orders_differ, "sum"):
        assert outcome.error.startswith("PlanMismatchError: "), outcome.details
        assert "PYTHONHASHSEED=0" in outcome.error
