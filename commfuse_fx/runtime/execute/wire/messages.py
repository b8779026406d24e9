"""Messages of torch.distributed, which it starts asynchronously: one for each op that starts a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from commfuse_fx.ir.core.collectives import c10d
from commfuse_fx.ir.core.member_ops import Tables, all_gather_members, reduce_scatter_members
from commfuse_fx.ir.core.meta import Stretch
from commfuse_fx.ir.core.owner_ops import reduce, reduce_
from commfuse_fx.support.renamed import all_gather_single, reduce_scatter_single

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor: the tensor itself if it is contiguous, else a one-dimensional view."""
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Flight:
    """A collective that has been started.

    out: the tensor that its wait yields. work: the handle of the backend. tensors: the tensors that the backend uses.
    finish: what is left to do once the backend is done, as often as anybody waits.
    """

    out: torch.Tensor
    work: Any
    tensors: tuple[torch.Tensor, ...]
    finish: Callable[[], None] = _nothing


def _all_reduce(group: Any, ranks: Any, x: torch.Tensor, op: str, axes: str) -> Flight:
    return _all_reduce_in_place(group, ranks, x.clone(), op, axes)


def _all_reduce_in_place(group: Any, ranks: Any, x: torch.Tensor, op: str, axes: str) -> Flight:
    block = _memory(x)
    return Flight(x, dist.all_reduce(block, _REDUCE_OPS[op], group, async_op=True), (block,))


def _all_gather(
    group: Any, ranks: Any, x: torch.Tensor, size: int, axes: str, sizes: Sequence[int] | None = None
) -> Flight:
    tables = Tables((x.numel(),) if sizes is None else tuple(sizes), size)
    return gather(group, x, tables, tables.all, x.new_empty((x.shape[0] * size, *x.shape[1:])))


def gather(group: Any, x: torch.Tensor, tables: Tables, stretch: Stretch, out: torch.Tensor) -> Flight:
    """Send a stretch of what this rank has, and get it of all ranks into their places in `out`."""
    given, whole = x.reshape(-1)[stretch.begin : stretch.end], out.view(-1)
    if tables.is_table(stretch):
        (received,), finish = tables.columns(whole, stretch), _nothing
    else:
        received = whole.new_empty((tables.ways, stretch.size))
        finish = partial(tables.put, whole, stretch, received)
    work = all_gather_single(received.view(-1), given, group, async_op=True)
    return Flight(out, work, (given, received), finish)


def _reduce_scatter(
    group: Any, ranks: Any, x: torch.Tensor, op: str, size: int, axes: str, sizes: Sequence[int] | None = None
) -> Flight:
    tables = Tables((x.numel() // size,) if sizes is None else tuple(sizes), size)
    return scatter(group, x, op, tables, tables.all, x.new_empty((x.shape[0] // size, *x.shape[1:])))


def scatter(group: Any, x: torch.Tensor, op: str, tables: Tables, stretch: Stretch, out: torch.Tensor) -> Flight:
    """Reduce a stretch of all ranks' parts of x, and get this rank's one into its place in `out`."""
    given = tables.message(x.reshape(-1), stretch).reshape(-1)
    into = out.view(-1)[stretch.begin : stretch.end]
    if x.is_cpu and op == "sum":
        return _exchange_and_add(group, given, tables.ways, out, into)
    return Flight(out, reduce_scatter_single(into, given, _REDUCE_OPS[op], group, async_op=True), (given, out))


def _exchange_and_add(group: Any, given: torch.Tensor, size: int, out: torch.Tensor, into: torch.Tensor) -> Flight:
    """A reduce_scatter by an all_to_all: Gloo's own one reduces all of it on every rank, which sends twice as much."""
    received = torch.empty_like(given)
    work = dist.all_to_all_single(received, given, group=group, async_op=True)
    left = [received]

    def add() -> None:
        if left:  # in the order of the ranks
            first, second, *others = left.pop().chunk(size)
            torch.add(first, second, out=into)
            for row in others:
                into.add_(row)

    return Flight(out, work, (given, received), add)


def _broadcast(group: Any, ranks: Any, x: torch.Tensor, src: int, axes: str) -> Flight:
    return _broadcast_in_place(group, ranks, x.clone(), src, axes)


def _broadcast_in_place(group: Any, ranks: Any, x: torch.Tensor, src: int, axes: str) -> Flight:
    block = _memory(x)
    return Flight(x, dist.broadcast(block, ranks[src], group, async_op=True), (block,))


def _reduce(group: Any, ranks: Any, x: torch.Tensor, op: str, owner: int, axes: str) -> Flight:
    return _reduce_in_place(group, ranks, x.clone(), op, owner, axes)


def _reduce_in_place(group: Any, ranks: Any, x: torch.Tensor, op: str, owner: int, axes: str) -> Flight:
    block = _memory(x)
    return Flight(x, dist.reduce(block, ranks[owner], _REDUCE_OPS[op], group, async_op=True), (block,))


def _all_to_all(group: Any, ranks: Any, x: torch.Tensor, outputs: list[int], inputs: list[int], axes: str) -> Flight:
    given, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    return Flight(out, dist.all_to_all_single(out, given, outputs, inputs, group, async_op=True), (given, out))


ISSUE: dict[Any, Callable[..., Flight]] = {
    c10d.all_reduce.default: _all_reduce,
    c10d.all_reduce_.default: _all_reduce_in_place,
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.broadcast.default: _broadcast,
    c10d.broadcast_.default: _broadcast_in_place,
    c10d.all_to_all_single.default: _all_to_all,
    all_gather_members: _all_gather,
    reduce_scatter_members: _reduce_scatter,
    reduce: _reduce,
    reduce_: _reduce_in_place,
}

DEPEND_ON_ORDER = (
    c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor.default,
    c10d.all_to_all_single.default,
    all_gather_members,
    reduce_scatter_members,
)
"""Collectives whose results depend on the order of the ranks in their group."""
