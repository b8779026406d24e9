"""Every strategy of the layers' rules gives on parts what the op gives on the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from commfuse_fx.ir.meta import TensorSpec
from commfuse_fx.ir.placement import Partial, Placement, Replicate, Shard, local_shape
from commfuse_fx.sharding.call import AllReduce, OpCall, Result, Strategy, call_of
from commfuse_fx.sharding.prove import check_call, describe, run
from commfuse_fx.sharding.rules import (  # noqa: F401  (registers the rules)
    attention,
    convolution,
    embedding,
    losses,
    norms,
    pooling,
    softmax,
)
from commfuse_fx.sharding.rules.registry import compute_strategies

aten = torch.ops.aten
WAYS = pytest.mark.parametrize("ways", [2, 4])


def made(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype)


def scattered(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in memory of another order, with gaps."""
    room = torch.zeros(*reversed(tensor.shape), 2, dtype=tensor.dtype)
    view = room[..., 0].permute(*reversed(range(tensor.dim())))
    view.copy_(tensor)
    return view


def proved(target: Any, args: list[Any], ways: int, kwargs: dict[str, Any] | None = None) -> list[str]:
    """Descriptions of the call's strategies, all of them proved, with other strides too."""
    call, tensors = call_of(target, args, kwargs, ways)
    assert check_call(call, tensors, 1e-9, 1e-10) == []
    moved = [scattered(arg) if isinstance(arg, torch.Tensor) and arg.dim() > 1 else arg for arg in args]
    if _takes(target, moved, kwargs, _results(target, args, kwargs)):
        call, tensors = call_of(target, moved, kwargs, ways)
        assert check_call(call, tensors, 1e-9, 1e-10) == []
    return [describe(strategy) for strategy in compute_strategies(call)]


def _takes(target: Any, args: list[Any], kwargs: dict[str, Any] | None, expected: list[Any]) -> bool:
    """Whether the op itself can work with tensors that lie so in memory: some raise, some give wrong results."""
    try:
        results = _results(target, args, kwargs)
    except RuntimeError as error:
        if "contiguous" not in str(error) and "stride" not in str(error):
            raise
        return False
    return all(_same(a, b) for a, b in zip(expected, results, strict=True))


def _results(target: Any, args: list[Any], kwargs: dict[str, Any] | None) -> list[Any]:
    out = target(*args, **(kwargs or {}))
    return list(out) if isinstance(out, (tuple, list)) else [out]


def _same(a: Any, b: Any) -> bool:
    return bool(torch.allclose(a, b, equal_nan=True)) if isinstance(a, torch.Tensor) else a == b


def found(call: OpCall, inputs: str) -> Strategy:
    (one,) = [s for s in compute_strategies(call) if describe(s).split(" -> ")[0] == inputs]
    return one


# Norms


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


# Softmax


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


# Losses


def _targets(*shape: int, classes: int = 8) -> torch.Tensor:
    target = torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(3))
    target.flatten()[1] = -100
    return target


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
        x, target = made(*shape), _targets(shape[0], *shape[2:])
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
        (aten.nll_loss_forward.default, [made(8, 8), _targets(8), None, 1, -100]),
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


# Embedding


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


# Convolution


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


# Pooling and resizing


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


# Attention


@WAYS
@pytest.mark.parametrize("heads", [8, 4])
@pytest.mark.parametrize("mask_shape", [None, (4, 8, 6, 6), (1, 1, 6, 6), (4, 1, 6, 6), (1, 8, 6, 6), (6, 6)])
def test_attention_on_cpu(ways: int, heads: int, mask_shape: tuple[int, ...] | None) -> None:
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    query, key, value = made(4, 8, 6, 16), made(4, heads, 6, 16, seed=1), made(4, heads, 6, 16, seed=2)
    mask = None if mask_shape is None else made(*mask_shape)
    kwargs = {"attn_mask": mask, "scale": 0.3}
    args = [query, key, value, 0.0, mask is None]
    have = proved(forward, args, ways, kwargs)
    masks = [""] * 2
    if mask_shape is not None:
        masks = [", S(0)" if mask_shape[:-2] and mask_shape[0] == 4 else ", R"]
        masks.append(", S(1)" if mask_shape[:-2] and mask_shape[1] == 8 else ", R")
    assert have[1:] == [f"S({d}), S({d}), S({d}){masks[d]} -> S({d}), S({d})" for d in (0, 1)]
    out, logsumexp = forward(*args, **kwargs)
    args = [made(4, 8, 6, 16, seed=3), query, key, value, out, logsumexp, 0.0, mask is None]
    have = proved(backward, args, ways, kwargs)
    six = ", ".join(["S({0})"] * 6)
    assert have[1:] == [f"{six.format(d)}{masks[d]} -> S({d}), S({d}), S({d})" for d in (0, 1)]


@WAYS
def test_one_head_of_keys_for_all_queries(ways: int) -> None:
    query, key, value = made(4, 8, 6, 16), made(4, 1, 6, 16, seed=1), made(4, 1, 6, 16, seed=2)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert "S(1), R, R -> S(1), S(1)" in proved(forward, [query, key, value], ways)
    args = [made(4, 8, 6, 16, seed=3), query, key, value, *forward(query, key, value), 0.0, False]
    have = proved(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, args, ways)
    assert "S(1), S(1), R, R, S(1), S(1) -> S(1), P, P" in have


def test_heads_that_do_not_divide() -> None:
    args = [made(4, 8, 6, 16), made(4, 2, 6, 16), made(4, 2, 6, 16)]
    assert len(proved(aten._scaled_dot_product_flash_attention_for_cpu.default, args, 4)) == 2  # by batch only


def test_attention_with_dropout_is_not_divided() -> None:
    spec = TensorSpec((4, 8, 6, 16), torch.float32, (768, 96, 16, 1))
    query = key = value = torch.empty(spec.shape, device="meta")
    call, _ = call_of(aten._scaled_dot_product_flash_attention_for_cpu.default, [query, key, value])
    assert len(compute_strategies(call)) == 3
    dropping = OpCall(call.target, (*call.args[:3], 0.1), (), call.inputs, call.outputs, 2)
    assert len(compute_strategies(dropping)) == 1


def _fake_locals(call: OpCall, strategy: Strategy, tensors: list[torch.Tensor]) -> list[Any]:
    """What one rank's steps give for parts of the right shapes, in fake tensors."""
    parts = []
    for tensor, placement in zip(tensors, strategy.inputs, strict=True):
        shape = local_shape(tensor.shape, placement, call.ways)
        parts.append([tensor.new_empty(shape)] * call.ways)
    return run(call, strategy, parts)[0]


def _check_shapes(target: Any, args: list[Any], kwargs: dict[str, Any] | None = None) -> list[str]:
    """For kernels that need a GPU: every strategy's parts have the shapes that its placements promise."""
    call, tensors = call_of(target, args, kwargs, 2)
    for strategy in compute_strategies(call):
        results = _fake_locals(call, strategy, tensors)
        for result, spec, placement in zip(results, call.outputs, strategy.outputs, strict=True):
            if spec is not None:
                assert tuple(result.shape) == local_shape(spec.shape, placement, 2), describe(strategy)
    return [describe(strategy) for strategy in compute_strategies(call)]


def _divided_outputs(have: list[str], d: int, count: int) -> bool:
    return any(each.split(" -> ")[1].split(", ")[:count] == [f"S({d})"] * count for each in have)


@pytest.mark.parametrize("kind", ["efficient", "flash", "cudnn"])
def test_attention_on_cuda_by_shapes(kind: str) -> None:
    with FakeTensorMode():
        query = torch.empty(4, 8, 64, 32, device="cuda", dtype=torch.float16)
        bias = torch.empty(4, 8, 64, 64, device="cuda", dtype=torch.float16)
        if kind == "efficient":
            forward = aten._scaled_dot_product_efficient_attention.default
            made_ = forward(query, query, query, bias, True)
            have = _check_shapes(forward, [query, query, query, bias, True])
            backward = aten._scaled_dot_product_efficient_attention_backward.default
            args = [query, query, query, query, bias, *made_, 0.0, [True] * 4]
            grads = _check_shapes(backward, args)
            shared = torch.empty(1, 8, 64, 64, device="cuda", dtype=torch.float16)
            call, _ = call_of(backward, [*args[:4], shared, *args[5:]])
            spec = TensorSpec.of(shared)
            with_shared = OpCall(call.target, call.args, call.kwargs, call.inputs, (*call.outputs[:3], spec), 2)
            by_batch = compute_strategies(with_shared)[1]
            assert by_batch.inputs[4] == Replicate() and by_batch.outputs[3] == Partial()
        elif kind == "flash":
            forward = aten._scaled_dot_product_flash_attention.default
            out, logsumexp, _, _, m, n, state, offset, _ = forward(query, query, query)
            have = _check_shapes(forward, [query, query, query])
            backward = aten._scaled_dot_product_flash_attention_backward.default
            lengths = torch.empty(0, device="cuda", dtype=torch.int32)
            args = [query, query, query, query, out, logsumexp, lengths, lengths, m, n, 0.0, False, state, offset]
            grads = _check_shapes(backward, args)
        else:
            forward = aten._scaled_dot_product_cudnn_attention.default
            out, logsumexp, _, _, m, n, state, offset, _ = forward(query, query, query, bias, True)
            have = _check_shapes(forward, [query, query, query, bias, True])
            backward = aten._scaled_dot_product_cudnn_attention_backward.default
            lengths = torch.empty(0, device="cuda", dtype=torch.int32)
            args = [query] * 4 + [out, logsumexp, state, offset, bias, lengths, lengths, m, n, 0.0, False]
            grads = _check_shapes(backward, args)
    assert all(_divided_outputs(have, d, 2) and _divided_outputs(grads, d, 3) for d in (0, 1))


# What the rules have made of an op, divided once more on a further mesh axis


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


# Steps


def test_steps_of_the_rules_can_be_traced_and_told_apart() -> None:
    """Functions of the package in steps are pure, and name results of earlier steps only."""
    x = made(4, 8)
    for target, args in (
        (aten._softmax.default, [x, 1, False]),
        (aten._log_softmax.default, [x, 1, False]),
        (aten._softmax_backward_data.default, [x, x, 1, x.dtype]),
        (aten.nll_loss_forward.default, [x, _targets(4), None, 2, -100]),
        (aten.embedding.default, [x, _targets(4, classes=4).clamp(min=0)]),
    ):
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
            call, tensors = call_of(target, fake)
            for strategy in compute_strategies(call):
                _fake_locals(call, strategy, tensors)
                for number, step in enumerate(strategy.steps):
                    if isinstance(step, AllReduce):
                        assert isinstance(step.value, Result) and step.value.step < number
                    elif not hasattr(step.target, "_schema"):
                        assert step.target.commfuse_pure


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
