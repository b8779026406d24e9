"""How a tensor changes its layout on one group of ranks, as graph nodes; a later pass lowers them to collectives.

In all of these `group` names mesh axes, and `blocks` is as in `Shard`. `serves`, on reductions of gradients, names
the parameters they are for; `cause` says to people why the node is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.functions import pure

_WHY_NOT = "redistributions are lowered to collectives before a graph runs"


def own_part(x: torch.Tensor, index: int, ways: int, dim: int, blocks: int) -> torch.Tensor:
    """The part of rank `index` of `ways`, contiguous. Sends nothing."""
    size = x.shape[dim] // (ways * blocks)
    if blocks == 1:
        part = x.narrow(dim, index * size, size)
    else:
        part = x.unflatten(dim, (blocks, ways, size)).select(dim + 1, index).flatten(dim, dim + 1)
    return part.clone(memory_format=torch.contiguous_format)


def sum_partial(x: torch.Tensor, group: str, op: str) -> torch.Tensor:
    """all_reduce: partial sums (or maxima) become the whole tensor on every rank."""
    raise RuntimeError(_WHY_NOT)


def sum_and_divide(x: torch.Tensor, group: str, ways: int, dim: int, blocks: int) -> torch.Tensor:
    """reduce_scatter: partial sums become one part of the sum per rank."""
    raise RuntimeError(_WHY_NOT)


def gather_parts(x: torch.Tensor, group: str, ways: int, dim: int, blocks: int) -> torch.Tensor:
    """all_gather: parts become the whole tensor on every rank."""
    raise RuntimeError(_WHY_NOT)


def exchange_parts(x: torch.Tensor, group: str, ways: int, from_dim: int, to_dim: int) -> torch.Tensor:
    """all_to_all: parts along one dimension become parts along another."""
    raise RuntimeError(_WHY_NOT)


COLLECTIVES = (sum_partial, sum_and_divide, gather_parts, exchange_parts)

for _function in (own_part, *COLLECTIVES):
    pure(_function)


def is_redistribution(node: fx.Node) -> bool:
    """Whether the node is one that has to be lowered."""
    return node.op == "call_function" and node.target in COLLECTIVES


def meta_shape(target: Any, shape: tuple[int, ...], ways: int, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Shape of the result of a redistribution over `ways` ranks; args: its arguments after the group."""
    sizes = list(shape)
    if target is sum_and_divide:
        sizes[args[1]] //= ways
    elif target is gather_parts:
        sizes[args[1]] *= ways
    elif target is exchange_parts:
        sizes[args[1]] *= ways
        sizes[args[2]] //= ways
    return tuple(sizes)
