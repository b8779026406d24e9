"""Every strategy of the rules for convolution, pooling and resizing gives on parts what the op gives on the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from commfuse_fx.ir.core.placement import Shard
from commfuse_fx.sharding.rules.writing.call import call_of
from commfuse_fx.sharding.rules.writing.rule_registry import compute_strategies
from tests.sharding.layers import WAYS, aten, made, proved


@WAYS
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_convolution(ways: int, dims: int, transposed: bool, biased: bool) -> None:
    sizes = [5, 4, 3][:dims]
    x, weight = made(4, 8, *sizes), made(8, 8, *([3] * dims), seed=1)
    bias = made(8, seed=2) if biased else None
    rest = [[1] * dims, [1] * dims, [1] * dims, transposed, [0] * dims, 1]
    have = proved(aten.convolution.default, [x, weight, bias, *rest], ways)
    by_out, by_in = ("S(1)", "S(0)") if transposed else ("S(0)", "S(1)")
    r, s = (", R", ", S(0)") if biased else ("", "")
    assert have[1:] == [f"S(0), R{r} -> S(0)", f"R, {by_out}{s} -> S(1)", f"S(1), {by_in}{r} -> P"]
    grad = made(*aten.convolution.default(x, weight, bias, *rest).shape, seed=3)
    args = [grad, x, weight, [8] if biased else None, *rest, [True, True, biased]]
    have = proved(aten.convolution_backward.default, args, ways)
    p, s, r = ("P", "S(0)", "R") if biased else ("R", "R", "R")
    assert have[1:] == [
        f"S(0), S(0), R -> S(0), P, {p}",
        f"S(1), R, {by_out} -> P, {by_out}, {s}",
        f"R, S(1), {by_in} -> S(1), {by_in}, {r}",
    ]


@WAYS
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [8, 4, 2])
def test_grouped_convolution(ways: int, transposed: bool, groups: int) -> None:
    x, bias = made(4, 8, 5, 5), made(8, seed=2)
    weight = made(8, 8 // groups, 3, 3, seed=1)
    rest = [[2, 1], [1, 1], [1, 1], transposed, [0, 0], groups]
    have = proved(aten.convolution.default, [x, weight, bias, *rest], ways)
    assert ("S(1), S(0), S(0) -> S(1)" in have) == (groups % ways == 0)
    assert not any(each.endswith("P") for each in have)
    grad = made(*aten.convolution.default(x, weight, bias, *rest).shape, seed=3)
    args = [grad, x, weight, [8], *rest, [True, True, True]]
    have = proved(aten.convolution_backward.default, args, ways)
    assert ("S(1), S(1), S(0) -> S(1), S(0), S(0)" in have) == (groups % ways == 0)
    args = [grad, x, weight, None, *rest, [False, True, False]]
    assert "S(0), S(0), R -> R, P, R" in proved(aten.convolution_backward.default, args, ways)


def _image(dims: int) -> torch.Tensor:
    return made(4, 8, *([6] * dims))


def _pooling_calls() -> list[tuple[Any, list[Any]]]:
    two, three, grad = _image(2), _image(3), made(4, 8, 3, 3, seed=1)
    grad3 = made(4, 8, 3, 3, 3, seed=1)
    flat = [[2, 2], [2, 2], [0, 0]]
    deep = [[2, 2, 2], [2, 2, 2], [0, 0, 0]]
    _, where = aten.max_pool2d_with_indices.default(two, *flat)
    _, where3 = aten.max_pool3d_with_indices.default(three, *deep)
    _, where_adaptive = aten.adaptive_max_pool2d.default(two, [3, 3])
    return [
        (aten.avg_pool1d.default, [_image(1), [2], [2]]),
        (aten.max_pool2d_with_indices.default, [two, *flat]),
        (aten.max_pool2d_with_indices_backward.default, [grad, two, *flat, [1, 1], False, where]),
        (aten.max_pool3d_with_indices.default, [three, *deep]),
        (aten.max_pool3d_with_indices_backward.default, [grad3, three, *deep, [1, 1, 1], False, where3]),
        (aten.avg_pool2d.default, [two, *flat]),
        (aten.avg_pool2d_backward.default, [grad, two, *flat, False, True, None]),
        (aten.avg_pool3d.default, [three, *deep]),
        (aten.avg_pool3d_backward.default, [grad3, three, *deep, False, True, None]),
        (aten._adaptive_avg_pool2d.default, [two, [3, 3]]),
        (aten._adaptive_avg_pool2d_backward.default, [grad, two]),
        (aten._adaptive_avg_pool3d.default, [three, [3, 3, 3]]),
        (aten._adaptive_avg_pool3d_backward.default, [grad3, three]),
        (aten.adaptive_max_pool2d.default, [two, [3, 3]]),
        (aten.adaptive_max_pool2d_backward.default, [grad, two, where_adaptive]),
        (aten.adaptive_max_pool3d.default, [three, [3, 3, 3]]),
        (aten.reflection_pad1d.default, [_image(1), [1, 2]]),
        (aten.reflection_pad2d.default, [two, [1, 2, 1, 2]]),
        (aten.reflection_pad2d_backward.default, [made(4, 8, 9, 9), two, [1, 2, 1, 2]]),
        (aten.replication_pad2d.default, [two, [1, 2, 1, 2]]),
        (aten.replication_pad2d_backward.default, [made(4, 8, 9, 9), two, [1, 2, 1, 2]]),
        (aten.upsample_nearest1d.default, [_image(1), [9]]),
        (aten.upsample_linear1d.default, [_image(1), [9], False]),
        (aten.upsample_nearest2d.default, [two, [9, 12]]),
        (aten.upsample_bilinear2d.default, [two, [9, 12], False]),
        (aten.upsample_bicubic2d.default, [two, [9, 12], True]),
        (aten._upsample_nearest_exact2d.default, [two, [9, 12]]),
        (aten._upsample_bilinear2d_aa.default, [two, [9, 12], False]),
        (aten.upsample_trilinear3d.default, [three, [7, 7, 7], False]),
        (aten.upsample_nearest3d.default, [three, [7, 7, 7]]),
        (aten.upsample_nearest1d_backward.default, [made(4, 8, 9), [9], [4, 8, 6]]),
        (aten.upsample_linear1d_backward.default, [made(4, 8, 9), [9], [4, 8, 6], False]),
        (aten.upsample_nearest2d_backward.default, [made(4, 8, 9, 12), [9, 12], [4, 8, 6, 6]]),
        (aten.upsample_bilinear2d_backward.default, [made(4, 8, 9, 12), [9, 12], [4, 8, 6, 6], False]),
        (aten.upsample_bicubic2d_backward.default, [made(4, 8, 9, 12), [9, 12], [4, 8, 6, 6], True]),
        (aten.upsample_trilinear3d_backward.default, [made(4, 8, 7, 7, 7), [7] * 3, [4, 8, 6, 6, 6], False]),
    ]


POOLING = _pooling_calls()


@pytest.mark.parametrize("target, args", POOLING, ids=[str(target) for target, _ in POOLING])
def test_images_are_divided_by_batch_and_channel(target: Any, args: list[Any]) -> None:
    for ways in (2, 4):
        call, _ = call_of(target, args, ways=ways)
        strategies = compute_strategies(call)[1:]
        assert [{*s.inputs, *s.outputs} for s in strategies] == [{Shard(0)}, {Shard(1)}]
        proved(target, args, ways)


def test_image_without_batch_is_divided_by_channel() -> None:
    assert proved(aten._adaptive_avg_pool2d.default, [made(8, 6, 6), [2, 2]], 2) == ["R -> R", "S(0) -> S(0)"]
