"""Every strategy of the rules for softmax and losses gives on parts what the op gives on the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from commfuse_fx.sharding.rules.prove import check_call
from commfuse_fx.sharding.rules.writing.call import AllReduce, call_of
from commfuse_fx.sharding.rules.writing.rule_registry import compute_strategies
from tests.sharding.layers import WAYS, aten, found, made, proved, targets


@WAYS
@pytest.mark.parametrize("target", [aten._softmax.default, aten._log_softmax.default])
@pytest.mark.parametrize("dim", [1, -1, 0])
def test_softmax(ways: int, target: Any, dim: int) -> None:
    x = made(4, 8, 12) * 50
    assert proved(target, [x, dim, False], ways) == ["R -> R", *(f"S({d}) -> S({d})" for d in _sorted(dim))]


def _sorted(dim: int) -> list[int]:
    return [*(d for d in range(3) if d != dim % 3), dim % 3]


@WAYS
def test_softmax_with_masked_scores(ways: int) -> None:
    x = made(4, 8)
    x[0, :6] = float("-inf")  # all of the first ranks' parts
    x[1] = float("-inf")  # a row of nothing: nan in torch, zeros in the safe form
    x[2] = float("-inf")
    x[2, 0] = torch.nan  # on one rank: the whole row is nan
    for target in (aten._softmax.default, aten._log_softmax.default):
        assert "S(1) -> S(1)" in proved(target, [x, 1, False], ways)
    assert "S(1) -> S(1)" in proved(aten._safe_softmax.default, [x, 1], ways)
    call, tensors = call_of(aten._safe_softmax.default, [x.float(), 1], {"dtype": torch.float64}, ways)
    assert check_call(call, tensors, 1e-9, 1e-10) == []


@WAYS
@pytest.mark.parametrize("dim", [1, -1, 0])
def test_softmax_backward(ways: int, dim: int) -> None:
    x, grad = made(4, 8, 12), made(4, 8, 12, seed=1)
    for forward, target in (
        (aten._softmax.default, aten._softmax_backward_data.default),
        (aten._log_softmax.default, aten._log_softmax_backward_data.default),
    ):
        have = proved(target, [grad, forward(x, dim, False), dim, x.dtype], ways)
        assert have[1:] == [f"S({d}), S({d}) -> S({d})" for d in _sorted(dim)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmax_of_narrow_types_adds_up_in_float32(dtype: torch.dtype) -> None:
    x = made(2, 4096).to(dtype)
    for target in (aten._softmax.default, aten._log_softmax.default):
        call, tensors = call_of(target, [x, 1, False])
        assert check_call(call, tensors, 1e-2, 1e-6) == []
        strategy = found(call, "S(1)")
        assert [step.op for step in strategy.steps if isinstance(step, AllReduce)] == ["max", "sum"]
        assert strategy.comm == 2 * (2 + 4)  # rows × (bytes of a maximum + bytes of a sum)


def test_softmax_says_what_it_sends() -> None:
    x = made(4, 8, 6)
    call, _ = call_of(aten._softmax.default, [x, 1, False])
    assert found(call, "S(1)").comm == 4 * 6 * 8 * 2
    assert found(call, "S(0)").comm == 0
    call, _ = call_of(aten._log_softmax_backward_data.default, [x, x, 1, x.dtype])
    assert found(call, "S(1), S(1)").comm == 4 * 6 * 8


@WAYS
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", [0, 2])
@pytest.mark.parametrize("ignored", [-100, 5])
def test_nll_loss(ways: int, weighted: bool, reduction: int, ignored: int) -> None:
    weight = made(8).abs() if weighted else None
    w = ", R" if weighted else ""
    for forward, backward, shape in (
        (aten.nll_loss_forward.default, aten.nll_loss_backward.default, (8, 8)),
        (aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default, (4, 8, 4, 8)),
    ):
        x, target = made(*shape), targets(shape[0], *shape[2:])
        if ignored >= 0:
            target = target.clamp(min=0)
        have = proved(forward, [x, target, weight, reduction, ignored], ways)
        assert f"S(0), S(0){w} -> {'P, P' if reduction else 'S(0), R'}" in have
        assert f"S(1), R{w} -> P, R" in have
        loss, total = forward(x, target, weight, reduction, ignored)
        args = [made(*loss.shape, seed=4), x, target, weight, reduction, ignored, total]
        have = proved(backward, args, ways)
        for unused in "PR":
            grad = "R" if reduction else "S(0)"
            assert f"{grad}, S(0), S(0){w}, {unused} -> S(0)" in have
            assert f"R, S(1), R{w}, {unused} -> S(1)" in have
        if len(shape) == 4:
            assert f"{'R' if reduction else 'S(2)'}, S(3), S(2){w}, R -> S(3)" in have


@WAYS
@pytest.mark.parametrize("reduction", [0, 2])
def test_nll_loss_of_one_sample(ways: int, reduction: int) -> None:
    x, target, weight = made(8), torch.tensor(5), made(8).abs()
    assert "S(0), R, R -> P, R" in proved(aten.nll_loss_forward.default, [x, target, weight, reduction, -100], ways)
    args = [made(1)[0], x, target, weight, reduction, -100, weight[5]]
    assert "R, S(0), R, R, R -> S(0)" in proved(aten.nll_loss_backward.default, args, ways)


def test_means_are_left_to_their_decomposition() -> None:
    for target, args in (
        (aten.nll_loss_forward.default, [made(8, 8), targets(8), None, 1, -100]),
        (aten.mse_loss.default, [made(8, 8), made(8, 8, seed=1), 1]),
    ):
        call, _ = call_of(target, args)
        assert len(compute_strategies(call)) == 1


def test_classes_divided_with_infinite_logits() -> None:
    """An infinite logit of another class must not turn the loss into nan."""
    x = made(4, 8)
    x[:, 7] = float("-inf")
    call, tensors = call_of(aten.nll_loss_forward.default, [x, torch.tensor([0, 1, 4, 5]), None, 2, -100], ways=4)
    assert check_call(call, tensors) == []


ELEMENTWISE = [
    (aten.mse_loss.default, aten.mse_loss_backward.default, []),
    (aten.smooth_l1_loss.default, aten.smooth_l1_loss_backward.default, [0.7]),
    (aten.huber_loss.default, aten.huber_loss_backward.default, [0.7]),
    (aten.soft_margin_loss.default, aten.soft_margin_loss_backward.default, []),
]


@WAYS
@pytest.mark.parametrize("forward, backward, extra", ELEMENTWISE)
@pytest.mark.parametrize("reduction", [0, 2])
def test_elementwise_losses(ways: int, forward: Any, backward: Any, extra: list[Any], reduction: int) -> None:
    x, y = made(4, 8), made(4, 8, seed=1)
    have = proved(forward, [x, y, reduction, *extra], ways)
    assert have[1:] == [f"S({d}), S({d}) -> {'P' if reduction else f'S({d})'}" for d in (0, 1)]
    grad = made(4, 8, seed=2) if reduction == 0 else made(1)[0]
    have = proved(backward, [grad, x, y, reduction, *extra], ways)
    assert have[1:] == [f"{'R' if reduction else f'S({d})'}, S({d}), S({d}) -> S({d})" for d in (0, 1)]


@WAYS
@pytest.mark.parametrize("reduction", [0, 2])
def test_binary_cross_entropy(ways: int, reduction: int) -> None:
    x, y, weight = made(4, 8).sigmoid(), made(4, 8, seed=1).sigmoid(), made(8).abs()
    have = proved(aten.binary_cross_entropy.default, [x, y, weight, reduction], ways)
    assert f"S(0), S(0), R -> {'P' if reduction else 'S(0)'}" in have
    assert f"S(1), S(1), S(0) -> {'P' if reduction else 'S(1)'}" in have
    args = [x, y, weight, made(4, 1).abs(), reduction]
    have = proved(aten.binary_cross_entropy_with_logits.default, args, ways)
    assert f"S(0), S(0), R, S(0) -> {'P' if reduction else 'S(0)'}" in have
    grad = made(4, 8, seed=2) if reduction == 0 else made(1)[0]
    have = proved(aten.binary_cross_entropy_backward.default, [grad, x, y, weight, reduction], ways)
    assert f"{'R' if reduction else 'S(1)'}, S(1), S(1), S(0) -> S(1)" in have
