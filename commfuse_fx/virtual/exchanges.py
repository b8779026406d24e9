"""Collectives as functions on the list of all ranks' tensors. Each call fills the result of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from commfuse_fx.ir.core.collectives import c10d
from commfuse_fx.ir.core.member_ops import Tables, all_gather_members, reduce_scatter_members
from commfuse_fx.ir.core.owner_ops import reduce, reduce_

Tensors = list[torch.Tensor]


_REDUCE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def _reduce(values: Tensors, op: str) -> torch.Tensor:
    """Reduce in rank order, in the dtype of the tensors."""
    total = values[0]
    for value in values[1:]:
        total = _REDUCE[op](total, value)
    return total / len(values) if op == "avg" else total


# `out`: the result of one rank. `sent`: the tensors that the group's ranks send, in order. `mine`: the rank's position
# in the group.


def _all_reduce(out: torch.Tensor, sent: Tensors, mine: int, op: str, group: str) -> None:
    out.copy_(_reduce(sent, op))


def _all_gather(out: torch.Tensor, sent: Tensors, mine: int, size: int, group: str) -> None:
    out.copy_(torch.cat(sent))


def _reduce_scatter(out: torch.Tensor, sent: Tensors, mine: int, op: str, size: int, group: str) -> None:
    out.copy_(_reduce([value.chunk(size)[mine] for value in sent], op))


def _broadcast(out: torch.Tensor, sent: Tensors, mine: int, src: int, group: str) -> None:
    out.copy_(sent[src])


def _reduce_to_owner(out: torch.Tensor, sent: Tensors, mine: int, op: str, owner: int, group: str) -> None:
    if mine == owner:  # what the others get is as undefined as it was on the wire
        out.copy_(_reduce(sent, op))


def _all_to_all(out: torch.Tensor, sent: Tensors, mine: int, outputs: list[int], inputs: list[int], group: str) -> None:
    out.copy_(torch.cat([value.split(inputs)[mine] for value in sent]))


def _all_gather_members(out: torch.Tensor, sent: Tensors, mine: int, size: int, group: str, sizes: list[int]) -> None:
    tables = Tables(tuple(sizes), size)
    tables.put(out, tables.all, torch.stack(sent))


def _reduce_scatter_members(
    out: torch.Tensor, sent: Tensors, mine: int, op: str, size: int, group: str, sizes: list[int]
) -> None:
    tables = Tables(tuple(sizes), size)
    out.copy_(_reduce([tables.message(value, tables.all)[mine] for value in sent], op))


def own_part(out: torch.Tensor, sent: Tensors, mine: int, *args: Any) -> None:
    """Stand in for a dropped collective: repeat or slice the rank's own data to the shape of the result."""
    own = sent[mine]
    if own.shape == out.shape:
        out.copy_(own)
    elif own.shape[0] < out.shape[0]:
        out.copy_(torch.cat([own] * len(sent)))
    else:
        out.copy_(own.chunk(len(sent))[mine])


EXCHANGE: dict[Any, Callable[..., None]] = {
    c10d.all_reduce.default: _all_reduce,
    c10d.all_reduce_.default: _all_reduce,
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.broadcast.default: _broadcast,
    c10d.broadcast_.default: _broadcast,
    c10d.all_to_all_single.default: _all_to_all,
    all_gather_members: _all_gather_members,
    reduce_scatter_members: _reduce_scatter_members,
    reduce: _reduce_to_owner,
    reduce_: _reduce_to_owner,
}

IN_PLACE = (c10d.all_reduce_.default, c10d.broadcast_.default, reduce_)
COPIES_ITS_INPUT = (*IN_PLACE, c10d.all_reduce.default, c10d.broadcast.default, reduce)
