"""Functions that run several ops cost what those ops read and write, which is counted here while they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from commfuse_fx.cost.roofline import flops_and_bytes, roofline_seconds
from commfuse_fx.ir.functions import InnerOps
from commfuse_fx.ir.meta import TensorSpec
from commfuse_fx.kernels import position_bits, position_random
from commfuse_fx.kernels.position_random import bernoulli_at, dropout_at
from tests.cost.graphs import CORE, Graph, f32

SIZE = 64
PIECE = 16
"""Elements that the test has a CPU mix at once."""

F32, I64 = torch.float32, torch.int64
PLACE = (torch.tensor(3), 2, (0,), (SIZE,))
ARGUMENTS: dict[Callable[..., Any], tuple[Any, ...]] = {
    position_random.dropout_at: (torch.rand(SIZE), 0.1, *PLACE),
    position_random.uniform_at: ((SIZE,), 0.0, 2.0, *PLACE, F32),
    position_random.normal_at: ((SIZE,), 0.0, 1.0, *PLACE, F32),
    position_random.exponential_at: ((SIZE,), 1.0, *PLACE, F32),
    position_random.bernoulli_at: ((SIZE,), 0.1, *PLACE, F32),
    position_random.bernoulli_of_at: (torch.rand(SIZE), *PLACE),
    position_random.randint_at: ((SIZE,), 0, 10, *PLACE, I64),
    position_random.randperm_at: (SIZE, *PLACE[:2], I64),
}


class Count(TorchDispatchMode):
    """Counts ops, and the bytes of tensors of `SIZE` elements that they read or write.

    Pieces of such a tensor stay in a cache: each is read once and written once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0
        self.bytes = 0
        self._cached: dict[tuple[int, str], None] = {}

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
                self._touch(value, "write")
            if argument.name != "out":
                self._touch(value, "read")
        if not any(argument.is_write for argument in arguments):
            self._touch(result, "write")
        return result

    def _touch(self, value: Any, how: str) -> None:
        for tensor in pytree.tree_leaves(value):
            if not isinstance(tensor, torch.Tensor):
                continue
            is_piece = tensor.numel() == PIECE and tensor.untyped_storage().nbytes() > tensor.nbytes
            known = (tensor.data_ptr(), how)
            if tensor.numel() == SIZE or (is_piece and known not in self._cached):
                self.bytes += tensor.nbytes
            if is_piece:
                self._cached[known] = None


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
def test_what_is_declared_is_what_runs(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for CUDA: both mix all elements with one op after another."""
    declared: InnerOps = function.commfuse_inner
    count, result = counted(function, "meta")
    assert (declared.count, declared.on_cuda) == (count.ops, count.bytes // result.nbytes)
    monkeypatch.setattr(position_bits, "_AT_ONCE", PIECE)
    count, result = counted(function, "cpu")
    assert declared.on_cpu == count.bytes // result.nbytes


def test_drawing_a_mask_costs_many_times_an_elementwise_op() -> None:
    g = Graph()
    for size, device in ((1 << 18, "cpu"), (1 << 23, "cuda:0")):
        large = TensorSpec((size,), F32, (1,), device=device)
        x = g.input(f"x.{device}", large)
        plain = flops_and_bytes(g.op("double", x, x, spec=large))[1]
        mask = g.op("mask", [size], 0.9, 0, 0, [0], [size], F32, device, target=bernoulli_at, spec=large)
        passes = bernoulli_at.commfuse_inner.on_cpu if device == "cpu" else bernoulli_at.commfuse_inner.on_cuda
        assert flops_and_bytes(mask) == (0, passes / 2 * plain)
        assert roofline_seconds(mask, CORE) == passes * large.nbytes / CORE.memory_bandwidth
        narrow = large.with_dtype(torch.bool)
        mask = g.op("bits", [size], 0.9, 0, 0, [0], [size], torch.bool, device, target=bernoulli_at, spec=narrow)
        assert flops_and_bytes(mask)[1] == passes / 2 * plain, "the bits have 4 bytes whatever is made of them"


def test_a_small_mask_costs_its_ops() -> None:
    g = Graph()
    x = g.input("x", f32(8))
    mask = g.op("drop", x, 0.9, 0, 0, [0], [8], target=dropout_at, spec=(f32(8), f32(8).with_dtype(torch.bool)))
    assert roofline_seconds(mask, CORE) == pytest.approx(44 * CORE.op_overhead)
