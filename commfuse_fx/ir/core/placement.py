"""How a tensor lies on the ranks of one mesh axis.

A layout on a mesh is one placement per axis, taken from the first axis on: the first divides the whole tensor, the
next the parts that this leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Every rank holds an equal part of dimension `dim` (>= 0).

    With `blocks` > 1 the dimension consists of that many equal blocks, and every rank holds its part of each of them:
    as the weight of a fused query-key-value projection (blocks=3) divided by heads.
    """

    dim: int
    blocks: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.blocks == 1 else f"S({self.dim};{self.blocks})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a summand of the whole shape."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True, slots=True)
class Owned:
    """The rank at this position holds the whole tensor, and the others none of its rows.

    Optimizer states lie so. No value of a graph does: it would have another shape on each rank.
    """

    position: int

    def __str__(self) -> str:
        return f"O({self.position})"


Placement = Replicate | Shard | Partial

R = Replicate()
P = Partial()


def S(dim: int, blocks: int = 1) -> Shard:
    """Divided along dimension `dim` in equal parts; with `blocks`, inside of each of so many equal blocks."""
    return Shard(dim, blocks)


def divides(shape: Sequence[int], placement: Placement, ways: int) -> bool:
    """Whether a tensor of this shape has equal parts for each of `ways` ranks."""
    if not isinstance(placement, Shard):
        return True
    return placement.dim < len(shape) and shape[placement.dim] % (ways * placement.blocks) == 0


def local_shape(shape: Sequence[int], placement: Placement, ways: int) -> tuple[int, ...]:
    """Shape of one rank's part."""
    if not isinstance(placement, Shard):
        return tuple(shape)
    return tuple(size // ways if dim == placement.dim else size for dim, size in enumerate(shape))


def divides_in_turn(shape: Sequence[int], placements: Iterable[tuple[Placement, int]]) -> bool:
    """Whether a tensor can lie so on several axes, each of which divides what those before it have left: placements,
    each with the number of ranks."""
    for placement, ways in placements:
        if not divides(shape, placement, ways):
            return False
        shape = local_shape(shape, placement, ways)
    return True


def whole_shape(shape: Sequence[int], placement: Placement, ways: int) -> tuple[int, ...]:
    """Shape of the tensor of which one rank's part has this shape."""
    if not isinstance(placement, Shard):
        return tuple(shape)
    return tuple(size * ways if dim == placement.dim else size for dim, size in enumerate(shape))


def take(tensor: torch.Tensor, placement: Placement, ways: int, index: int) -> torch.Tensor:
    """The part of rank `index`, contiguous; a copy where the tensor is divided, the tensor itself otherwise.

    A partial sum cannot be taken from a whole tensor: raises ValueError.
    """
    if isinstance(placement, Replicate):
        return tensor
    if isinstance(placement, Partial):
        raise ValueError("a partial sum is not a part of a tensor")
    dim, blocks = placement.dim, placement.blocks
    parts = tensor.unflatten(dim, (blocks, ways, tensor.shape[dim] // (blocks * ways)))
    mine: torch.Tensor = parts.select(dim + 1, index).flatten(dim, dim + 1)
    return mine.clone(memory_format=torch.contiguous_format)


def assemble(parts: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor:
    """The whole tensor from the parts of all ranks, in their order; the inverse of `take`, and the sum of summands."""
    if isinstance(placement, Replicate):
        return parts[0]
    if isinstance(placement, Partial):
        return torch.stack(list(parts)).sum(0)
    dim, blocks = placement.dim, placement.blocks
    stacked = torch.stack([part.unflatten(dim, (blocks, part.shape[dim] // blocks)) for part in parts], dim + 1)
    return stacked.flatten(dim, dim + 2)
