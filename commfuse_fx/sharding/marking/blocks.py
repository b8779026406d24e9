"""Find fused projections, whose weights are divided inside each section of their output.

If a user asks for slices of a fused query-key-value weight, contiguous slices would give one rank the queries and
another one the keys. Slices of each of the three sections give every rank whole heads, without communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.meta import TensorSpec, info

aten = torch.ops.aten

_SAME_DIMS = (aten._to_copy.default, aten.clone.default, aten.add.Tensor, aten.mul.Tensor)
_PRODUCTS = (aten.mm.default, aten.matmul.default, aten.bmm.default)


def sections(node: fx.Node, dim: int) -> int:
    """The number of equal sections into which later nodes split dimension `dim` of this node; 1 if they do not."""
    for value, along in _carriers(node, dim):
        for user in value.users:
            if info(user).phase == "forward" and (count := _split(user, value, along)) > 1:
                return count
    return 1


def _carriers(node: fx.Node, dim: int) -> Iterator[tuple[fx.Node, int]]:
    """The values of the forward that have this dimension, and which of theirs it is: first the node itself."""
    pending: list[tuple[fx.Node, int]] = [(node, dim)]
    seen: dict[tuple[fx.Node, int], None] = {}
    while pending:
        value, along = pending.pop()
        if (value, along) in seen:
            continue
        seen[value, along] = None
        yield value, along
        for user in value.users:
            following = _follow(user, value, along) if info(user).phase == "forward" else None
            if following is not None:
                pending.append((user, following))


def _split(user: fx.Node, value: fx.Node, dim: int) -> int:
    """The number of equal parts, if this op splits the dimension."""
    size = _shape(value)[dim]
    args: Sequence[Any] = user.args
    if user.target is aten.split.Tensor and _dim(args, 2, value) == dim and size % args[1] == 0:
        return int(size // args[1])
    if user.target is aten.split_with_sizes.default and _dim(args, 2, value) == dim and len(set(args[1])) == 1:
        return len(args[1])
    if user.target in (aten.view.default, aten._unsafe_view.default):
        found = _view_dims(_shape(value), _shape(user), dim)
        # Sections, then what is in each of them: only if the sections are taken apart again.
        if found is not None and len(found) == 2 and _is_taken_apart(user, found[0]):
            return _shape(user)[found[0]]
    return 1


def _is_taken_apart(node: fx.Node, dim: int) -> bool:
    apart = (aten.select.int, aten.unbind.int)
    return any(
        user.target in apart and _dim(user.args, 1, value) == along
        for value, along in _carriers(node, dim)
        for user in value.users
    )


def _dim(args: Sequence[Any], position: int, value: fx.Node) -> int:
    dim = args[position] if position < len(args) else 0
    return int(dim) % len(_shape(value))


def _follow(user: fx.Node, value: fx.Node, dim: int) -> int | None:
    """The position of this dimension in the result of an op; None if the op changes the dimension."""
    if not isinstance(info(user).spec, TensorSpec):
        return None
    shape, out = _shape(value), _shape(user)
    args: Sequence[Any] = user.args
    if user.target is aten.t.default:
        return 1 - dim if len(shape) == 2 else dim
    if user.target is aten.transpose.int:
        swap = [int(each) % len(shape) for each in args[1:3]]
        return swap[1 - swap.index(dim)] if dim in swap else dim
    if user.target is aten.permute.default:
        return [int(each) % len(shape) for each in args[1]].index(dim)
    if user.target is aten.unsqueeze.default:
        at = int(args[1]) % len(out)
        return dim + 1 if at <= dim else dim
    if user.target in (aten.squeeze.dim,):
        at = int(args[1]) % len(shape)
        if len(out) == len(shape):
            return dim
        return None if at == dim else dim - (at < dim)
    if user.target in _PRODUCTS:
        return _of_product(args[0], args[1], value, dim, len(out))
    if user.target is aten.addmm.default:
        if args[0] is value:
            return dim + len(out) - len(shape)
        return _of_product(args[1], args[2], value, dim, len(out))
    if user.target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        found = _view_dims(shape, out, dim)
        return found[0] if found is not None and len(found) == 1 else None
    if user.target in _SAME_DIMS:
        moved = dim + len(out) - len(shape)
        return moved if out[moved] == shape[dim] else None
    return None


def _of_product(left: Any, right: Any, value: fx.Node, dim: int, rank: int) -> int | None:
    if right is value and dim == len(_shape(value)) - 1:
        return rank - 1
    if left is value and dim == len(_shape(value)) - 2:
        return rank - 2
    return None


def _view_dims(old: tuple[int, ...], new: tuple[int, ...], dim: int) -> list[int] | None:
    """The dimensions (of more than one element) of the new shape that dimension `dim` of the old one becomes."""
    before = 1
    for size in old[:dim]:
        before *= size
    found: list[int] = []
    reached, left = 1, old[dim]
    for position, size in enumerate(new):
        if reached == before and left > 1 and size > 1:
            if left % size:
                return None
            found.append(position)
            left //= size
        elif reached < before:
            reached *= size
    return found if reached == before and left == 1 and found else None


def _shape(node: fx.Node) -> tuple[int, ...]:
    spec = info(node).spec
    assert isinstance(spec, TensorSpec)
    return spec.shape
