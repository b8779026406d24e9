"""Describe indexing by tensors: the dimensions of the data that are indexed, and the positions of the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commfuse_fx.sharding.rules.writing.call import OpCall, Ref


@dataclass(frozen=True)
class Indexing:
    """The dimensions of data[indices], which follows numpy's advanced indexing.

    dims: the dimensions of the data that are indexed.
    indices: the shapes of the index tensors.
    positions: the shape to which index tensors are broadcast.
    first: the dimension of the result at which the shape `positions` begins.
    kept: for each other dimension of the data its position in the data and in the result.
    result: the shape of data[indices].
    """

    dims: tuple[int, ...]
    indices: tuple[tuple[int, ...], ...]
    positions: tuple[int, ...]
    first: int
    kept: tuple[tuple[int, int], ...]
    result: tuple[int, ...]


def indexing_of(call: OpCall) -> Indexing | None:
    """The indexing of index(data, indices) or index_put(data, indices, ...). None for masks, which select by value."""
    shape = call.inputs[0].shape
    given = [(dim, each) for dim, each in enumerate(call.args[1]) if isinstance(each, Ref)]
    specs = [call.inputs[each.index] for _, each in given]
    if not given or any(spec.dtype in (torch.bool, torch.uint8) for spec in specs):
        return None
    dims = tuple(dim for dim, _ in given)
    positions = tuple(torch.broadcast_shapes(*(spec.shape for spec in specs)))
    adjacent = dims[-1] - dims[0] == len(dims) - 1
    first = dims[0] if adjacent else 0
    others = [dim for dim in range(len(shape)) if dim not in dims]
    places = [i if i < first else i + len(positions) for i in range(len(others))]
    sizes = [shape[dim] for dim in others]
    result = (*sizes[:first], *positions, *sizes[first:])
    indices, kept = tuple(spec.shape for spec in specs), tuple(zip(others, places, strict=True))
    return Indexing(dims, indices, positions, first, kept, result)
