"""Decompositions give what the ops give, and have strategies that divide the batch where the ops have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from commfuse_fx.sharding.rules.writing.decompose import decompose, decomposed

aten = torch.ops.aten


def made(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype)


def same(target: Any, *args: Any, rtol: float = 1e-6, atol: float = 1e-7) -> list[str]:
    """Compare the decomposition with the op; returns the ops that it calls."""
    function = decompose(target)
    assert function is not None
    expected, result = target(*args), function(*args)
    for a, b in zip(_flat(expected), _flat(result), strict=True):
        assert (a is None) == (b is None)
        if a is not None and a.numel():
            assert a.dtype == b.dtype and a.shape == b.shape
            torch.testing.assert_close(b, a, rtol=rtol, atol=atol, equal_nan=True)
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]

    def call(*given: torch.Tensor) -> Any:
        values = iter(given)
        return function(*(next(values) if isinstance(arg, torch.Tensor) else arg for arg in args))

    graph = make_fx(call)(*tensors).graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _targets(*shape: int, classes: int = 8) -> torch.Tensor:
    target = torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(3))
    target.flatten()[1] = -100
    return target


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [-100, 5])
@pytest.mark.parametrize("shape", [(6, 8), (4, 8, 3, 5)])
def test_nll_loss(weighted: bool, ignored: int, shape: tuple[int, ...]) -> None:
    forward, backward = (
        (aten.nll_loss_forward.default, aten.nll_loss_backward.default)
        if len(shape) == 2
        else (aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default)
    )
    x, target = made(*shape), _targets(shape[0], *shape[2:])
    target = target if ignored < 0 else target.clamp(min=0)
    weight = made(8).abs() if weighted else None
    ops = same(forward, x, target, weight, 1, ignored)
    assert "aten.div.Tensor" in ops
    _, total = forward(x, target, weight, 1, ignored)
    same(backward, torch.tensor(0.7), x, target, weight, 1, ignored, total)


def test_nll_loss_where_everything_is_ignored() -> None:
    x, target = made(4, 8), torch.full((4,), -100)
    same(aten.nll_loss_forward.default, x, target, None, 1, -100)  # nan, as in torch
    same(aten.nll_loss_backward.default, torch.tensor(1.0), x, target, None, 1, -100, torch.tensor(0.0))


def test_nll_loss_of_one_sample() -> None:
    x, target = made(8), torch.tensor(5)
    same(aten.nll_loss_forward.default, x, target, made(8).abs(), 1, -100)


@pytest.mark.parametrize(
    "name, extra",
    [("mse_loss", ()), ("smooth_l1_loss", (0.7,)), ("huber_loss", (0.7,)), ("soft_margin_loss", ())],
)
def test_elementwise_losses(name: str, extra: tuple[float, ...]) -> None:
    x, y = made(4, 8), made(4, 8, seed=1)
    forward, backward = getattr(aten, name).default, getattr(aten, f"{name}_backward").default
    assert same(forward, x, y, 1, *extra) == [str(forward), "aten.div.Scalar"]
    assert same(backward, torch.tensor(0.7), x, y, 1, *extra) == ["aten.div.Scalar", str(backward)]


@pytest.mark.parametrize("weighted", [False, True])
def test_binary_cross_entropy(weighted: bool) -> None:
    x, y = made(4, 8).sigmoid(), made(4, 8, seed=1).sigmoid()
    weight = made(8).abs() if weighted else None
    same(aten.binary_cross_entropy.default, x, y, weight, 1)
    same(aten.binary_cross_entropy_backward.default, torch.tensor(0.7), x, y, weight, 1)
    same(aten.binary_cross_entropy_with_logits.default, x, y, weight, weight, 1)


def test_arguments_that_are_left_out() -> None:
    """The mean is what losses take by default; smaller operands broadcast."""
    x, y = made(4, 8), made(4, 8, seed=1)
    for target in (aten.mse_loss.default, aten.binary_cross_entropy_with_logits.default):
        same(target, x, y)
    same(aten.mse_loss.default, x, made(8))
    function = decompose(aten.smooth_l1_loss.default)
    assert function is not None
    torch.testing.assert_close(function(x, y, beta=0.3), aten.smooth_l1_loss.default(x, y, beta=0.3))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(6, 5), (4, 5, 7), (4, 5, 3, 6), (2, 5, 3, 2, 2)])
def test_batch_norm(affine: bool, shape: tuple[int, ...]) -> None:
    x = made(*shape) * 3 + 100  # one pass over such numbers would lose half of the digits
    weight, bias = (made(5, seed=1), made(5, seed=2)) if affine else (None, None)
    mean, var = made(5, seed=3), made(5, seed=4).abs()
    args = (x, weight, bias, mean, var, True, 0.1, 1e-5)
    same(aten._native_batch_norm_legit_functional.default, *args, rtol=2e-6, atol=2e-5)
    same(aten._native_batch_norm_legit.no_stats, x, weight, bias, True, 0.1, 1e-5, rtol=2e-6, atol=2e-5)
    ops = same(aten.native_batch_norm.default, x, weight, bias, None, None, True, 0.1, 1e-5, rtol=2e-6, atol=2e-5)
    assert ops.count("aten.sum.dim_IntList") == 2 and not any("batch_norm" in op for op in ops)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, True)])
def test_batch_norm_backward(affine: bool, mask: tuple[bool, bool, bool]) -> None:
    mask = (mask[0], mask[1] and affine, mask[2] and affine)
    x, grad = made(4, 5, 3, 6), made(4, 5, 3, 6, seed=9)
    weight = made(5, seed=1) if affine else None
    mean, var = made(5, seed=3), made(5, seed=4).abs()
    _, saved, inverse, _, _ = aten._native_batch_norm_legit_functional.default(
        x, weight, None, mean, var, True, 0.1, 1e-5
    )
    args = (grad, x, weight, mean, var, saved, inverse, True, 1e-5, mask)
    ops = same(aten.native_batch_norm_backward.default, *args, rtol=2e-6, atol=2e-6)
    assert not any("batch_norm" in op for op in ops)


def test_batch_norm_to_six_digits() -> None:
    """Largest error over largest value, at a size at which float32 sums round."""
    x, grad = made(32, 8, 16, 16), made(32, 8, 16, 16, seed=9)
    weight, bias = made(8, seed=1), made(8, seed=2)
    mean, var = torch.zeros(8), torch.ones(8)
    forward = aten._native_batch_norm_legit_functional.default
    found, expected = decompose(forward), forward(x, weight, bias, mean, var, True, 0.1, 1e-5)
    assert found is not None
    _check_relative(found(x, weight, bias, mean, var, True, 0.1, 1e-5), expected)
    backward = aten.native_batch_norm_backward.default
    args = (grad, x, weight, mean, var, expected[1], expected[2], True, 1e-5, (True, True, True))
    found = decompose(backward)
    assert found is not None
    _check_relative(found(*args), backward(*args))


def _check_relative(result: Any, expected: Any) -> None:
    for a, b in zip(result, expected, strict=True):
        assert float((a - b).abs().max() / b.abs().max()) < 1e-6


def test_batch_norm_of_narrow_types_adds_up_in_float32() -> None:
    x = (made(64, 5, 16, 16) * 3 + 10).bfloat16()
    weight, bias, mean, var = made(5, seed=1), made(5, seed=2), torch.zeros(5), torch.ones(5)
    forward = aten._native_batch_norm_legit_functional.default
    args = (x, weight, bias, mean, var, True, 0.1, 1e-5)
    same(forward, *args, rtol=1e-2, atol=1e-2)
    function = decompose(forward)
    assert function is not None
    for found, expected in zip(function(*args)[1:], forward(*args)[1:], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_gradients_through_decompositions() -> None:
    """Autograd through the plain ops gives what the op's own backward gives: the value is the same function."""
    x = made(4, 5, 3, dtype=torch.float64).requires_grad_()
    weight = made(5, seed=1, dtype=torch.float64).requires_grad_()
    function = decompose(aten.native_batch_norm.default)
    assert function is not None
    args = (x, weight, None, None, None, True, 0.1, 1e-5)
    upstream = made(4, 5, 3, seed=7, dtype=torch.float64)
    found = torch.autograd.grad(function(*args)[0], (x, weight), upstream)
    expected = torch.autograd.grad(aten.native_batch_norm.default(*args)[0], (x, weight), upstream)
    torch.testing.assert_close(found, expected)
    y = made(4, 5, 3, seed=2, dtype=torch.float64)
    function = decompose(aten.mse_loss.default)
    assert function is not None
    found = torch.autograd.grad(function(x, y, 1), x)
    torch.testing.assert_close(found, torch.autograd.grad(aten.mse_loss.default(x, y, 1), x))


def test_label_smoothing_needs_nothing_more() -> None:
    """torch writes its smoothed part in sums and divisions itself; the whole loss comes out the same."""
    x, target, weight = made(6, 8), _targets(6), made(8).abs()
    table = {op: decompose(op) for op in decomposed()}

    def loss(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        value = torch.nn.functional.cross_entropy(x, target, weight, label_smoothing=0.1)
        return value.detach(), torch.autograd.grad(value, x)[0]

    traced = make_fx(loss, decomposition_table=table)(x, target, weight)
    torch.testing.assert_close(traced(x, target, weight), loss(x, target, weight))
    nodes = [node for node in traced.graph.nodes if "nll_loss" in str(node.target)]
    assert [node.args[3 if "forward" in str(node.target) else 4] for node in nodes] == [2, 2]


def test_other_calls_are_left_alone() -> None:
    x, y, target = made(4, 8), made(4, 8, seed=1), _targets(4)
    per_channel = torch.ones(8)
    for op, args in (
        (aten.nll_loss_forward.default, (x, target, None, 2, -100)),
        (aten.nll_loss_backward.default, (y, x, target, None, 0, -100, torch.tensor(1.0))),
        (aten.mse_loss.default, (x, y, 0)),
        (aten.mse_loss_backward.default, (y, x, y, 2)),
        (aten._native_batch_norm_legit_functional.default, (x, None, None, per_channel, per_channel, False, 0.1, 1e-5)),
        (aten._native_batch_norm_legit.no_stats, (x, None, None, False, 0.1, 1e-5)),
        (aten.native_batch_norm.default, (x, None, None, per_channel, per_channel, True, 0.1, 1e-5)),
        (aten.cudnn_batch_norm.default, (x, per_channel, None, per_channel, per_channel, False, 0.1, 1e-5)),
        (aten.native_batch_norm_backward.default, (x, x, None, None, None, None, None, False, 1e-5, (True,) * 3)),
    ):
        function = decompose(op)
        assert function is not None and function(*args) is NotImplemented
    assert decompose(aten.add.Tensor) is None


def test_cudnn_batch_norm_without_statistics() -> None:
    x, weight, bias = made(4, 8, 3), made(8), made(8, seed=1)
    function = decompose(aten.cudnn_batch_norm.default)
    assert function is not None
    *found, reserve = function(x, weight, bias, None, None, True, 0.1, 1e-5)
    expected = aten.native_batch_norm.default(x, weight, bias, None, None, True, 0.1, 1e-5)
    torch.testing.assert_close(tuple(found), expected, rtol=2e-6, atol=2e-6)
    assert reserve.shape == (0,)
