"""Every strategy of the rules for norms gives on parts what the op gives on the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode

from commfuse_fx.ir.core.placement import Partial, Placement, Shard
from commfuse_fx.sharding.rules.prove import run
from commfuse_fx.sharding.rules.writing.call import OpCall, call_of
from commfuse_fx.sharding.rules.writing.rule_registry import compute_strategies
from tests.sharding.layers import WAYS, aten, found, made, proved, scattered


@WAYS
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(ways: int, affine: bool) -> None:
    x = made(4, 8, 6)
    weight, bias = (made(6), made(6, seed=1)) if affine else (None, None)
    after = ", R, R" if affine else ""
    have = proved(aten.native_layer_norm.default, [x, [6], weight, bias, 1e-5], ways)
    assert have[1:] == [f"S({d}){after} -> S({d}), S({d}), S({d})" for d in (0, 1)]
    assert proved(aten.native_layer_norm.default, [x, [8, 6], None, None, 1e-5], ways)[1:] == [
        "S(0) -> S(0), S(0), S(0)"
    ]


@WAYS
@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, True)])
def test_layer_norm_backward(ways: int, mask: tuple[bool, bool, bool]) -> None:
    x, weight, bias = made(4, 8, 6), made(6), made(6, seed=1)
    _, mean, rstd = aten.native_layer_norm.default(x, [6], weight, bias, 1e-5)
    args = [made(4, 8, 6, seed=2), x, [6], mean, rstd, weight, bias, mask]
    have = proved(aten.native_layer_norm_backward.default, args, ways)
    for d in (0, 1):
        outputs = (f"S({d})" if mask[0] else "R", "P" if mask[1] else "R", "P" if mask[2] else "R")
        assert f"S({d}), S({d}), S({d}), S({d}), R, R -> {', '.join(outputs)}" in have
    assert not any("P" in each.split(" -> ")[0] for each in have)


@WAYS
def test_statistics_in_other_memory(ways: int) -> None:
    """torch's backward op is wrong for these, so the parts are made contiguous; the whole is compared in order."""
    x, weight, bias = made(4, 8, 6), made(6), made(6, seed=1)
    _, mean, rstd = aten.native_layer_norm.default(x, [6], weight, bias, 1e-5)
    args = [made(4, 8, 6, seed=2), x, [6], mean, rstd, weight, bias, [True, True, True]]
    call, tensors = call_of(aten.native_layer_norm_backward.default, args, ways=ways)
    whole = aten.native_layer_norm_backward.default(*args)
    strategy = found(call, "S(1), S(1), S(1), S(1), R, R")
    parts = []
    for tensor, placement in zip(tensors, strategy.inputs, strict=True):
        divided = placement == Shard(1)
        chunks = tensor.chunk(ways, 1) if divided else (tensor,) * ways  # chunks are views: not contiguous
        parts.append([scattered(chunk) if divided else chunk for chunk in chunks])
    ranks = run(call, strategy, parts)
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks], 1), whole[0])
    torch.testing.assert_close(sum(rank[1] for rank in ranks), whole[1])
    torch.testing.assert_close(sum(rank[2] for rank in ranks), whole[2])


class OnAnyDevice(TorchDispatchMode):
    """Runs torch's decompositions of ops that have a kernel on CUDA only."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten._fused_rms_norm_backward.default:
            return decomposition_table[func](*args)
        return func(*args, **(kwargs or {}))


@WAYS
def test_rms_norm(ways: int) -> None:
    x, weight = made(4, 8, 6), made(6)
    have = proved(aten._fused_rms_norm.default, [x, [6], weight, 1e-5], ways)
    assert have[1:] == ["S(0), R -> S(0), S(0)", "S(1), R -> S(1), S(1)"]
    _, rstd = aten._fused_rms_norm.default(x, [6], weight, 1e-5)
    args = [made(4, 8, 6, seed=2), x, [6], rstd, weight, [True, True]]
    with OnAnyDevice():
        have = proved(aten._fused_rms_norm_backward.default, args, ways)
    assert have[1:] == [f"S({d}), S({d}), S({d}), R -> S({d}), P" for d in (0, 1)]


@WAYS
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_group_norm(ways: int, groups: int) -> None:
    x, weight, bias = made(4, 8, 3, 3), made(8), made(8, seed=1)
    args = [x, weight, bias, 4, 8, 9, groups, 1e-5]
    have = proved(aten.native_group_norm.default, args, ways)
    by_channel = groups % ways == 0
    assert "S(0), R, R -> S(0), S(0), S(0)" in have
    assert ("S(1), S(0), S(0) -> S(1), S(1), S(1)" in have) == by_channel
    _, mean, rstd = aten.native_group_norm.default(*args)
    args = [made(4, 8, 3, 3, seed=2), x, mean, rstd, weight, 4, 8, 9, groups, [True, True, True]]
    have = proved(aten.native_group_norm_backward.default, args, ways)
    assert "S(0), S(0), S(0), S(0), R -> S(0), P, P" in have
    assert ("S(1), S(1), S(1), S(1), S(0) -> S(1), S(0), S(0)" in have) == by_channel


@WAYS
def test_batch_norm_in_training_divides_channels_only(ways: int) -> None:
    x, grad = made(4, 8, 3), made(4, 8, 3, seed=2)
    weight, bias, mean, var = made(8), made(8, seed=1), made(8, seed=2), made(8, seed=3).abs()
    args = [x, weight, bias, mean, var, True, 0.1, 1e-5]
    have = proved(aten._native_batch_norm_legit_functional.default, args, ways)
    assert have[1:] == ["S(1), S(0), S(0), S(0), S(0) -> S(1), S(0), S(0), S(0), S(0)"]
    have = proved(aten._native_batch_norm_legit.no_stats, [x, None, None, True, 0.1, 1e-5], ways)
    assert have[1:] == ["S(1) -> S(1), S(0), S(0)"]
    _, saved, inverse, _, _ = aten._native_batch_norm_legit_functional.default(*args)
    args = [grad, x, weight, mean, var, saved, inverse, True, 1e-5, [True, True, True]]
    have = proved(aten.native_batch_norm_backward.default, args, ways)
    assert have[1:] == ["S(1), S(1), S(0), S(0), S(0), S(0), S(0) -> S(1), S(0), S(0)"]


@WAYS
def test_batch_norm_in_evaluation_divides_the_batch_too(ways: int) -> None:
    x, grad = made(4, 8, 3), made(4, 8, 3, seed=2)
    weight, bias, mean, var = made(8), made(8, seed=1), made(8, seed=2), made(8, seed=3).abs()
    args = [x, weight, bias, mean, var, False, 0.1, 1e-5]
    for target in (aten.native_batch_norm.default, aten._native_batch_norm_legit_functional.default):
        have = proved(target, args, ways)
        assert any(each.startswith("S(0), R, R, R, R -> S(0), R, R") for each in have)
        assert any(each.startswith("S(1), S(0), S(0), S(0), S(0) -> S(1), R, R") for each in have)
    have = proved(aten._native_batch_norm_legit_no_training.default, [*args[:5], 0.1, 1e-5], ways)
    assert len(have) == 3
    _, saved, inverse = aten.native_batch_norm.default(*args)
    args = [grad, x, weight, mean, var, saved, inverse, False, 1e-5, [True, True, True]]
    have = proved(aten.native_batch_norm_backward.default, args, ways)
    assert "S(0), S(0), R, R, R, R, R -> S(0), P, P" in have
    assert "S(1), S(1), S(0), S(0), S(0), R, R -> S(1), S(0), S(0)" in have


def test_batch_norm_that_writes_its_statistics_is_not_divided() -> None:
    args = [made(4, 8, 3), None, None, torch.zeros(8).double(), torch.ones(8).double(), True, 0.1, 1e-5]
    call, _ = call_of(aten.native_batch_norm.default, args)
    assert len(compute_strategies(call)) == 1


def _all_placements(call: OpCall) -> list[Placement]:
    return [placement for strategy in compute_strategies(call) for placement in strategy.inputs]


def test_no_norm_takes_partial_sums() -> None:
    x = made(4, 8, 6)
    for target, args in (
        (aten.native_layer_norm.default, [x, [6], None, None, 1e-5]),
        (aten.native_group_norm.default, [x, None, None, 4, 8, 6, 2, 1e-5]),
        (aten._softmax.default, [x, 1, False]),
    ):
        call, _ = call_of(target, args)
        assert Partial() not in _all_placements(call)
