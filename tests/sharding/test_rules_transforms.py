"""Every strategy of Fourier transforms, distances, bags of embeddings, grouped products and splits without views."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from commfuse_fx.sharding.rules.prove import check_call, describe
from commfuse_fx.sharding.rules.writing.call import call_of
from commfuse_fx.sharding.rules.writing.rule_registry import compute_strategies
from tests.sharding.layers import WAYS, aten, made


def proved(target: Any, args: list[Any], ways: int) -> set[str]:
    """Descriptions of the call's strategies, all of them proved."""
    call, tensors = call_of(target, args, ways=ways)
    tolerance = 1e-9 if tensors[0].dtype == torch.float64 or tensors[0].is_complex() else 1e-4
    assert check_call(call, tensors, tolerance, tolerance) == []
    return {describe(strategy) for strategy in compute_strategies(call)}


@WAYS
def test_fourier(ways: int) -> None:
    x = made(4, 8, 12)
    assert proved(aten._fft_r2c.default, [x, [2], 0, True], ways) >= {"S(0) -> S(0)", "S(1) -> S(1)", "P -> P"}
    have = proved(aten._fft_c2c.default, [torch.complex(x, made(4, 8, 12, seed=1)), [0, 2], 1, False], ways)
    assert {"S(1) -> S(1)", "P -> P"} <= have
    assert "S(0) -> S(0)" not in have
    half = aten._fft_r2c.default(x, [1], 0, True)
    have = proved(aten._fft_c2r.default, [half, [1], 2, 8], ways)
    assert {"S(0) -> S(0)", "S(2) -> S(2)", "P -> P"} <= have


@WAYS
@pytest.mark.parametrize("p", [1.0, 2.0])
def test_distances(ways: int, p: float) -> None:
    first, second = made(4, 8, 3), made(4, 12, 3, seed=1)
    have = proved(aten._cdist_forward.default, [first, second, p, None], ways)
    assert {"S(0), S(0) -> S(0)", "S(1), R -> S(1)", "R, S(1) -> S(2)"} <= have
    table = aten._cdist_forward.default(first, second, p, None)
    have = proved(aten._cdist_backward.default, [made(4, 8, 12), first, second, p, table], ways)
    assert {"S(0), S(0), S(0), S(0) -> S(0)", "S(1), S(1), R, S(1) -> S(1)"} <= have


@WAYS
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_bags(ways: int, mode: int) -> None:
    table, ids = made(8, 12), torch.tensor([0, 3, 3, 7, 5, 1, 2, 2])
    offsets = torch.tensor([0, 2, 2, 5])
    options = [False, mode, False, None, False, -1]
    found = aten._embedding_bag.default(table, ids, offsets, *options)
    largest = "S(1)" if mode == 2 else "R"
    have = proved(aten._embedding_bag.default, [table, ids, offsets, *options], ways)
    assert f"S(1), R, R -> S(1), R, R, {largest}" in have
    args = [made(4, 12), ids, offsets, *found[1:], 8, False, mode, False, None, -1]
    have = proved(aten._embedding_bag_backward.default, args, ways)
    assert f"S(1), R, R, R, R, {largest} -> S(1)" in have
    args = [made(4, 12), ids, *found[1:], 8, False, mode, None, -1]
    have = proved(aten._embedding_bag_dense_backward.default, args, ways)
    assert f"S(1), R, R, R, {largest} -> S(1)" in have


@WAYS
def test_splits_without_views(ways: int) -> None:
    x = made(4, 24)
    for target, sizes in (
        (aten.unsafe_split.Tensor, 8),
        (aten.unsafe_split_with_sizes.default, [8, 8, 8]),
        (aten.unsafe_chunk.default, 3),
    ):
        have = proved(target, [x, sizes, 1], ways)
        assert {"S(0) -> S(0), S(0), S(0)", "S(1;3) -> S(1), S(1), S(1)", "P -> P, P, P"} <= have


@WAYS
def test_grouped_products(ways: int) -> None:
    """Experts of a mixture: their tokens lie one behind the other, and end at the offsets."""
    ends = torch.tensor([4, 4, 16], dtype=torch.int32)
    single = torch.float32
    tokens, experts = made(16, 32, dtype=single), made(3, 32, 48, dtype=single)
    have = proved(aten._grouped_mm.default, [tokens, experts, ends], ways)
    assert {"S(1), S(1), R -> P", "R, S(2), R -> S(1)", "P, R, R -> P"} <= have
    assert not any(each.endswith("-> S(0)") for each in have)
    grad = made(16, 48, dtype=single)
    have = proved(aten._grouped_mm.default, [tokens.t(), grad, ends], ways)
    assert {"S(0), R, R -> S(1)", "R, S(1), R -> S(2)", "R, P, R -> P"} <= have
    assert "S(1), S(0), R -> P" not in have
    have = proved(aten._grouped_mm.default, [made(8, 16, 32, dtype=single), made(8, 32, 16, dtype=single)], ways)
    assert {"S(0), S(0) -> S(0)", "S(2), S(1) -> P", "S(1), R -> S(1)"} <= have
