"""Functionalization runs the nodes that it may change; all others are copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from commfuse_fx.capture.torch_parts.batch_norm import BATCH_NORMS
from commfuse_fx.capture.trace.empty_tensors import FakeTensors
from commfuse_fx.capture.trace.functional_trace import make_functional

aten = torch.ops.aten


def no_change(x: torch.Tensor, y: torch.Tensor) -> Any:
    return (x.t() @ y).relu(), torch.native_layer_norm(x, (4,), None, None, 1e-5)[0]


def change_of_a_value(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = torch.sigmoid(x) + y
    before = z * 3
    view = z[1:].t()
    z.mul_(2.0)
    return before + z, view.sum(), torch.relu(x)


def change_of_a_view(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = x.exp()
    w = z.view(2, -1)
    w[0].add_(1)
    z.detach().t()[0].zero_()
    return z.cos(), w.sin(), y.tan()


def change_of_an_input(x: torch.Tensor, y: torch.Tensor) -> Any:
    doubled = x * 2
    y.copy_(doubled)
    y[0].fill_(1.0)
    return (y @ doubled.t()).tanh()


def change_of_a_part(x: torch.Tensor, y: torch.Tensor) -> Any:
    out, mean, rstd = torch.native_layer_norm(x, (4,), None, None, 1e-5)
    mean.mul_(rstd)
    first, second = y.split(2)
    second.neg_()
    return out.square(), mean, first + second


def batch_norm(x: torch.Tensor, y: torch.Tensor) -> Any:
    mean, var = y[0] * 1, y[1] * 1
    out = F.batch_norm(x.sin(), mean, var, None, None, training=True)
    return out.cos(), mean * 2, var


def constant(x: torch.Tensor, y: torch.Tensor) -> Any:
    known = torch.arange(16.0).reshape(4, 4)
    held = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    y.add_(held)
    return x * known + held, y * held


def draws(x: torch.Tensor, y: torch.Tensor) -> Any:
    mask = torch.bernoulli(torch.full((4, 4), 0.5))
    noise = torch.empty(4, 4).uniform_()
    return x * mask + noise, y.relu()


CASES = [
    no_change,
    change_of_a_value,
    change_of_a_view,
    change_of_an_input,
    change_of_a_part,
    batch_norm,
    constant,
    draws,
]


def read(graph: fx.Graph) -> list[Any]:
    """The nodes in order, without those that only stand for another."""

    def layout(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [layout(each) for each in value]
        return (value.shape, value.stride(), value.dtype) if isinstance(value, FakeTensor) else value

    return [(str(node.format_node()), layout(node.meta.get("val"))) for node in graph.nodes]


def made_functional(
    function: Callable[..., Any], inputs: list[torch.Tensor], fake: FakeTensors
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The trace of a function, and the same made functional."""
    with fake:
        traced = make_fx(function)(*(fake.from_tensor(value) for value in inputs))
        return traced, make_functional(traced, [fake.from_tensor(value) for value in inputs], BATCH_NORMS)


@pytest.mark.parametrize("function", CASES)
def test_the_graph_is_that_of_functionalization(function: Callable[..., Any]) -> None:
    inputs = [torch.randn(4, 4), torch.randn(4, 4)]
    fake = FakeTensors(allow_non_fake_inputs=True)
    traced, functional = made_functional(function, inputs, fake)
    with fake:
        right = make_fx(
            functionalize(lambda *args: fx.Interpreter(traced).run(*args), remove="mutations"),
            decomposition_table=BATCH_NORMS,
        )(*(fake.from_tensor(value) for value in inputs))
    if function is no_change:
        assert functional is traced
    else:
        assert read(functional.graph) == read(right.graph)


@pytest.mark.parametrize("function", [case for case in CASES if case is not draws])
def test_values_are_those_of_eager_execution(function: Callable[..., Any]) -> None:
    inputs = [torch.randn(4, 4), torch.randn(4, 4)]
    functional = made_functional(function, inputs, FakeTensors(allow_non_fake_inputs=True))[1]
    eager, compiled = ([value.clone() for value in inputs] for _ in range(2))
    functional.recompile()
    for have, want in zip(
        tree_leaves(functional(*compiled)),
        tree_leaves(function(*eager)),
        strict=True,
    ):
        torch.testing.assert_close(have, want)
    torch.testing.assert_close(compiled, eager)
