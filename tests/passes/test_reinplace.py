"""In-place rewriting never overwrites what somebody still needs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.passes.fuse.reinplace import _IN_PLACE, _INTO


class Body(nn.Module):
    def __init__(self, body: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x, self.w)


def kept_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    row = y[0]
    z = y * 2
    return (z.sum() + row.sum()) * 1.0


def both_operands(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return (y + y).sum()


def through_views(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).view(2, 8)
    z = y.view(4, 4) * 3
    return (z * z.t()).sum()


def parts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    a, b = (x @ w).chunk(2)
    return (a * 2 + torch.tanh(b)).sum() + b.mul(a).sum()


def expanded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).sum(0, keepdim=True).expand(4, 4)
    return (y * 2 + 1).pow(2).sum()


def inputs_stay(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x + 1) * (w + 1)).relu().sum() + (x * 2).sum()


def scores(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    a = (x @ w).softmax(-1)
    b = torch.where(x > 0, (a @ w), (x @ w)).log_softmax(-1)
    return (a * b).sum() + nn.functional.gelu(x @ w).sum() + (nn.functional.elu(x @ w) * x).sum()


BODIES = [kept_view, both_operands, through_views, parts, expanded, inputs_stay, scores]


@pytest.mark.parametrize("body", BODIES)
def test_results_equal_eager(body: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    model = Body(body)
    twin = copy.deepcopy(model)
    x = torch.randn(4, 4, dtype=torch.float64)
    given = x.clone()
    loss = cf.compile(model, form="step")(x)
    expected = twin(x)
    expected.backward()
    assert torch.equal(x, given)
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(model.w.grad, twin.w.grad, rtol=0, atol=1e-13)


def test_ops_are_rewritten_where_that_is_safe() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 4))
    step = cf.compile(model, loss_fn=nn.functional.mse_loss, device_num=1)
    text = step.lower(torch.ones(2, 4), torch.ones(2, 4)).text()
    assert "aten.relu_(" in text
    assert "aten.bernoulli_" in text
    assert "grad_input=%" in text


def test_a_loss_over_classes_takes_the_memory_of_one_gradient_in_its_backward() -> None:
    step = cf.compile(nn.Linear(8, 100), loss_fn=nn.functional.cross_entropy, device_num=1)
    lines = step.lower(torch.ones(2, 8), torch.zeros(2, dtype=torch.long)).text().splitlines()
    softmax = next(line for line in lines if "_log_softmax_backward_data.out" in line)
    gradient = softmax.split("data.out(")[1].split(",")[0]
    assert gradient.endswith("nll_loss_backward.0")
    assert f"out={gradient}" in softmax


@pytest.mark.parametrize("op", _INTO, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_variants_compute_the_same_where_the_result_overwrites_an_input(op: Any, dtype: torch.dtype) -> None:
    into = _INTO[op]
    for shape in ((0, 3), (3,), (5, 37), (2, 3, 4, 128), (3, 1025), (70, 33)):
        for place in into.inputs:
            args = arguments(op, shape, dtype)
            expected = op(*args)
            into.target(*args, **{into.argument: args[place]})
            assert torch.equal(args[place], expected), (shape, place)


def arguments(op: Any, shape: tuple[int, ...], dtype: torch.dtype) -> list[Any]:
    """What an op may be called with: tensors of this shape and dtype, and values of its other arguments."""
    name = op._schema.name.removeprefix("aten::")
    grad, value = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    others: dict[str, list[Any]] = {
        "threshold_backward": [0.0],
        "hardtanh_backward": [-0.5, 0.5],
        "leaky_relu_backward": [0.1, False],
        "_softmax_backward_data": [-1, dtype],
        "_log_softmax_backward_data": [len(shape) - 1, dtype],
    }
    match name:
        case "where":
            return [torch.rand(shape) < 0.5, grad, value]
        case "_softmax" | "_log_softmax":
            return [value, -1, False]
        case "elu_backward":
            return [grad, 1.0, 1.0, 1.0, False, value]
        case _:
            return [grad, value, *others.get(name, [])]


def test_a_softmax_over_another_dimension_than_the_last_is_left() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x @ w).softmax(0) * x).sum()

    text = cf.compile(Body(body), form="step").lower(torch.randn(4, 4, dtype=torch.float64)).text()
    assert "_softmax(" in text
    assert "_softmax.out" not in text
    assert "_softmax_backward_data.out" not in text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_in_place_variants_round_as_the_ops_do(dtype: torch.dtype) -> None:
    x, y = torch.rand(37).add(0.5).to(dtype), torch.rand(37).add(0.5).to(dtype)
    for name in ("add", "sub", "mul", "div"):
        for overload, other in (("Tensor", y), ("Scalar", 1 / 3)):
            op = getattr(getattr(torch.ops.aten, name), overload)
            if op in _IN_PLACE:
                assert torch.equal(_IN_PLACE[op](x.clone(), other), op(x, other)), op
