"""Strategies of the rules for embeddings; and what rules have made of an op, divided once more on a further axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from commfuse_fx.sharding.rules.ops import embedding, losses, softmax
from commfuse_fx.sharding.rules.prove import check_call, describe, run
from commfuse_fx.sharding.rules.writing.call import AllReduce, Result, call_of
from commfuse_fx.sharding.rules.writing.rule_registry import compute_strategies
from tests.sharding.layers import WAYS, aten, fake_locals, found, made, proved, targets


@WAYS
@pytest.mark.parametrize("padding", [-1, 0, 6])
def test_embedding(ways: int, padding: int) -> None:
    table, ids = made(8, 12), torch.tensor([[0, 7, 6, 6], [1, 2, 0, 5], [3, 3, 3, 6], [4, 5, 6, 7]])
    have = proved(aten.embedding.default, [table, ids, padding], ways)
    assert have == ["R, R -> R", "R, S(0) -> S(0)", "R, S(1) -> S(1)", "S(1), R -> S(2)", "S(0), R -> P"]
    grad = made(4, 4, 12, seed=1)
    have = proved(aten.embedding_dense_backward.default, [grad, ids, 8, padding, False], ways)
    assert have == [
        "R, R -> R",
        "S(0), S(0) -> P",
        "S(1), S(1) -> P",
        "S(2), R -> S(1)",
        "P, R -> P",
        "R, R -> S(0)",
    ]
    have = proved(aten.embedding_dense_backward.default, [grad, ids, 8, padding, True], ways)
    assert "R, R -> S(0)" in have and "S(0), S(0) -> P" not in have
    table[2] = float("inf")  # a row that other ranks must not read into their zeros
    call, tensors = call_of(aten.embedding.default, [table, ids.clamp(max=1)], ways=ways)
    strategy = found(call, "S(0), R")
    parts = [list(tensors[0].chunk(ways)), [tensors[1]] * ways]
    total = sum(rank[0] for rank in run(call, strategy, parts))
    torch.testing.assert_close(total, table[ids.clamp(max=1)])


def again(target: Any, args: list[Any], ways: int) -> list[str]:
    call, tensors = call_of(target, args, ways=ways)
    assert check_call(call, tensors, 1e-9, 1e-10) == []
    return [describe(strategy) for strategy in compute_strategies(call)][1:]


@WAYS
@pytest.mark.parametrize("index", [0, 1])
def test_rows_of_an_embedding_again(ways: int, index: int) -> None:
    """This rank holds rows 0-7 or 8-15 of 16."""
    rows, ids = made(8, 12), torch.arange(16).reshape(4, 4).T.contiguous()
    have = again(embedding.embedding_of_rows, [rows, ids, index], ways)
    assert have == ["R, S(0) -> S(0)", "R, S(1) -> S(1)", "S(1), R -> S(2)", "S(0), R -> P"]
    for padding in (-1, 2, 9):
        have = again(embedding.embedding_gradient_of_rows, [made(4, 4, 12), ids, 8, padding, False, index], ways)
        assert have == ["S(0), S(0) -> P", "S(1), S(1) -> P", "S(2), R -> S(1)", "P, R -> P", "R, R -> S(0)"]
    have = again(embedding.embedding_gradient_of_rows, [made(4, 4, 12), ids, 8, -1, True, index], ways)
    assert have == ["S(2), R -> S(1)", "P, R -> P", "R, R -> S(0)"]


@WAYS
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("reduction", [0, 2])
def test_classes_of_a_loss_again(ways: int, index: int, reduction: int) -> None:
    x, target, weight = made(8, 8), torch.arange(0, 16, 2), made(16).abs()
    have = again(losses.nll_loss_of_classes, [x, target, weight, reduction, 4, 1, index], ways)
    assert have == [f"S(0), S(0), R -> {'P, P' if reduction else 'S(0), R'}", "S(1), R, R -> P, R"]
    grad = made(1)[0] if reduction else made(8)
    have = again(losses.nll_loss_gradient_of_classes, [grad, x, target, None, 4, 1, index], ways)
    assert have == [f"{'R' if reduction else 'S(0)'}, S(0), S(0) -> S(0)", "R, S(1), R -> S(1)"]


@WAYS
def test_steps_of_a_softmax_again(ways: int) -> None:
    x, y, row = made(4, 8), made(4, 8, seed=1), made(4, 1).abs()
    for function, args in (
        (softmax.exp_below_maximum, [x, row, None, False]),
        (softmax.normalized_by, [x, row, x.dtype, False]),
        (softmax.log_normalized_by, [x, row, row, x.dtype]),
        (softmax.softmax_gradient, [x, y, row, x.dtype]),
        (softmax.log_softmax_gradient, [x, y, row, x.dtype]),
    ):
        have = again(function, args, ways)
        assert [each.split(" -> ")[1] for each in have] == ["S(0)", "S(1)"]
        assert "S(1), R" in have[1] or "S(1), S(1), R" in have[1]
    for function, args in (
        (softmax.sum_of_exp_below_maximum, [x, row, 1]),
        (softmax.sum_of_products, [x, y, 1]),
        (softmax.sum_of_gradients, [x, 1]),
    ):
        have = again(function, args, ways)
        assert [each.split(" -> ")[1] for each in have] == ["S(0)", "P"]
    assert again(softmax.maximum_of_part, [x, 1, None], ways) == ["S(0) -> S(0)", "S(1) -> R"]


def test_steps_of_the_rules_can_be_traced_and_told_apart() -> None:
    """Functions of the package in steps are pure, and name results of earlier steps only."""
    x = made(4, 8)
    for target, args in (
        (aten._softmax.default, [x, 1, False]),
        (aten._log_softmax.default, [x, 1, False]),
        (aten._softmax_backward_data.default, [x, x, 1, x.dtype]),
        (aten.nll_loss_forward.default, [x, targets(4), None, 2, -100]),
        (aten.embedding.default, [x, targets(4, classes=4).clamp(min=0)]),
    ):
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
            call, tensors = call_of(target, fake)
            for strategy in compute_strategies(call):
                fake_locals(call, strategy, tensors)
                for number, step in enumerate(strategy.steps):
                    if isinstance(step, AllReduce):
                        assert isinstance(step.value, Result) and step.value.step < number
                    elif not hasattr(step.target, "_schema"):
                        assert step.target.commfuse_pure
