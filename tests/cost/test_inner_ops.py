"""Functions that run several ops cost what those ops read and write, which is counted here while they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from commfuse_fx.cost.drawn_numbers import CACHED, DRAWN_ON_CPU
from commfuse_fx.cost.roofline import flops_and_bytes, roofline_seconds
from commfuse_fx.ir.core.functions import InnerOps
from commfuse_fx.ir.core.meta import TensorSpec
from commfuse_fx.kernels import position_random
from commfuse_fx.kernels.masks import bernoulli_
from commfuse_fx.kernels.position_random import bernoulli_at, dropout_at
from tests.cost.graphs import CORE, Graph

aten = torch.ops.aten
SHAPE = (16, 64)
SIZE = 16 * 64  # more than rows and columns together
F32, I64 = torch.float32, torch.int64
PLACE = (torch.tensor(3), 2, (0, 0), SHAPE)
ARGUMENTS: dict[Callable[..., Any], tuple[Any, ...]] = {
    position_random.dropout_at: (torch.rand(SHAPE), 0.1, *PLACE),
    position_random.uniform_at: (SHAPE, 0.0, 2.0, *PLACE, F32),
    position_random.normal_at: (SHAPE, 0.0, 1.0, *PLACE, F32),
    position_random.exponential_at: (SHAPE, 1.0, *PLACE, F32),
    position_random.bernoulli_at: (SHAPE, 0.1, *PLACE, F32),
    position_random.bernoulli_of_at: (torch.rand(SHAPE), *PLACE),
    position_random.randint_at: (SHAPE, 0, 10, *PLACE, I64),
    position_random.randperm_at: (SIZE, *PLACE[:2], I64),
}


class Count(TorchDispatchMode):
    """Counts ops, and the bytes of tensors of `SIZE` elements that they read or write."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view or func._schema.name.startswith("aten::empty"):
            return result
        self.ops += 1
        arguments = func._schema.arguments
        for place, argument in enumerate(arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.is_write:
                self._touch(value)
            if argument.name != "out":
                self._touch(value)
        if not any(argument.is_write for argument in arguments):
            self._touch(result)
        return result

    def _touch(self, value: Any) -> None:
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and tensor.numel() == SIZE:
                self.bytes += tensor.nbytes


def counted(function: Callable[..., Any], device: str) -> tuple[Count, torch.Tensor]:
    """What a call on this device runs, and its first result."""
    arguments = [each.to(device) if isinstance(each, torch.Tensor) else each for each in ARGUMENTS[function]]
    takes_device = isinstance(arguments[-1], torch.dtype)
    with Count() as count:
        result = function(*arguments, *[device] * takes_device)
    return count, result[0] if isinstance(result, tuple) else result


def test_every_function_that_draws_is_counted() -> None:
    assert list(ARGUMENTS) == list(position_random._INNER)


@pytest.mark.parametrize("function", ARGUMENTS)
def test_what_is_declared_is_what_runs(function: Any) -> None:
    """The meta device stands for CUDA: both mix all elements with one op after another."""
    declared: InnerOps = function.commfuse_inner
    count, result = counted(function, "meta")
    assert (declared.count, declared.passes) == (count.ops, count.bytes // result.nbytes)


def test_drawing_a_mask_costs_many_times_an_elementwise_op() -> None:
    g = Graph()
    for size, device in ((1 << 18, "cpu"), (1 << 23, "cuda:0")):
        large = TensorSpec((size,), F32, (1,), device=device)
        x = g.input(f"x.{device}", large)
        plain = flops_and_bytes(g.op("double", x, x, spec=large))[1]
        mask = g.op("mask", [size], 0.9, 0, 0, [0], [size], F32, device, target=bernoulli_at, spec=large)
        passes = bernoulli_at.commfuse_inner.passes * (CACHED if device == "cpu" else 1)
        assert flops_and_bytes(mask) == (0, pytest.approx(passes / 2 * plain))
        assert roofline_seconds(mask, CORE) == pytest.approx(passes * large.nbytes / CORE.memory_bandwidth)
        narrow = large.with_dtype(torch.bool)
        mask = g.op("bits", [size], 0.9, 0, 0, [0], [size], torch.bool, device, target=bernoulli_at, spec=narrow)
        assert flops_and_bytes(mask)[1] == pytest.approx(passes / 2 * plain), (
            "the bits have 4 bytes whatever is made of them"
        )


@pytest.mark.parametrize(("device", "launches"), [("cpu", 1), ("cuda:0", 46)])
def test_a_small_mask_costs_the_kernels_that_it_launches(device: str, launches: int) -> None:
    g = Graph()
    small = TensorSpec((8,), F32, (1,), device=device)
    x = g.input("x", small)
    mask = g.op("drop", x, 0.9, 0, 0, [0], [8], target=dropout_at, spec=(small, small.with_dtype(torch.bool)))
    assert roofline_seconds(mask, CORE) == pytest.approx(launches * CORE.op_overhead)


def test_ops_that_draw_are_named_as_torch_names_them() -> None:
    for name in DRAWN_ON_CPU:
        library, op = name.split(".")
        assert str(getattr(getattr(torch.ops, library), op)) == name


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_cpu_draws_numbers_one_after_another(device: str) -> None:
    g = Graph()
    large = TensorSpec((1 << 18,), F32, (1,), device=device)
    x = g.input("x", large)
    nbytes = {
        draw: flops_and_bytes(g.op(f"draw.{number}", x, 0.9, target=draw, spec=large))[1]
        for number, draw in enumerate((aten.bernoulli_.float, bernoulli_, aten.uniform_.default, aten.normal_.default))
    }
    for draw, count in nbytes.items():
        passes = DRAWN_ON_CPU[str(draw.overloadpacket)] if device == "cpu" else 1
        assert count == passes * large.nbytes and (passes > 8) == (device == "cpu")
