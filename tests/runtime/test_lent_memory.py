"""Gradient memory is used again when nobody sees it any more, and only then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from commfuse_fx.ir.core.meta import TensorSpec
from commfuse_fx.runtime.memory.flat_pool import FlatPool
from commfuse_fx.runtime.memory.lent_memory import LentMemory

WHOLE = TensorSpec((128,), torch.float32, (1,))
PART = TensorSpec((8, 8), torch.float32, (8, 1))


def lent() -> tuple[FlatPool, LentMemory, nn.Parameter]:
    pool = FlatPool()
    memory = pool.lend("bucket", WHOLE)
    param = nn.Parameter(torch.ones(8, 8))
    memory.part(PART, 0)
    param.grad = memory.part(PART, 64).detach()
    return pool, memory, param


def test_parts_lie_in_the_memory_and_fill_their_storages() -> None:
    _, memory, param = lent()
    assert param.grad is not None
    memory.memory.copy_(torch.arange(128.0))
    assert torch.equal(param.grad, torch.arange(64.0, 128.0).view(8, 8))
    assert param.grad.untyped_storage().nbytes() == 8 * 8 * 4


def test_memory_is_free_when_the_gradients_are_gone() -> None:
    pool, memory, param = lent()
    assert pool.lend("bucket", WHOLE) is not memory, "the gradient is still there"
    pool, memory, param = lent()
    param.grad = None
    assert pool.lend("bucket", WHOLE) is memory
    assert pool.lend("another", WHOLE) is not memory


@pytest.mark.parametrize(
    "held",
    [
        lambda grad: grad,
        lambda grad: grad.detach(),
        lambda grad: grad.data,
        lambda grad: grad[0],
        lambda grad: grad.t(),
        lambda grad: grad.numpy(),
        lambda grad: grad.untyped_storage(),
        lambda grad: memoryview(grad.numpy()),
        lambda grad: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(grad)),
    ],
    ids=["gradient", "detach", "data", "row", "transposed", "numpy", "storage", "buffer", "dlpack"],
)
def test_whoever_sees_a_part_keeps_the_memory(held: Callable[[torch.Tensor], object]) -> None:
    pool, memory, param = lent()
    assert param.grad is not None
    kept = held(param.grad)
    param.grad = None
    assert pool.lend("bucket", WHOLE) is not memory
    del kept


def test_memory_that_was_moved_is_not_used_again() -> None:
    pool, memory, param = lent()
    assert param.grad is not None
    param.grad.share_memory_()
    param.grad = None
    assert pool.lend("bucket", WHOLE) is not memory


def test_forgotten_memory_is_not_used_again() -> None:
    pool, memory, param = lent()
    param.grad = None
    pool.forget_memory()
    assert pool.lend("bucket", WHOLE) is not memory
