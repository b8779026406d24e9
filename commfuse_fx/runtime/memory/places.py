"""Where a rank's part of a tensor lies in the whole tensor: boxes, as files describe them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch

from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.placement import Owned, Placement, Replicate, Shard

Run = tuple[int, int]
"""Where a run of neighbours along a dimension begins, and how long it is."""


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a whole tensor that lies in a rank's part.

    offsets, sizes: of the box in the whole tensor, per dimension.
    at: where it begins in the part, per dimension; one number where the part is a run of the flattened tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Those of the whole tensor."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offsets, self.sizes, strict=True))

    def of(self, part: torch.Tensor) -> torch.Tensor:
        """This box of a rank's part, as a view."""
        if len(self.at) != len(self.sizes):
            return part[self.at[0] : self.at[0] + self.numel].view(self.sizes)
        for dim, (begin, size) in enumerate(zip(self.at, self.sizes, strict=True)):
            part = part.narrow(dim, begin, size)
        return part


@dataclass(frozen=True, slots=True)
class Place:
    """A place says which boxes of a whole tensor a rank's part consists of.

    whole, part: their shapes. A part may have padding that lies in no box.
    """

    whole: tuple[int, ...]
    part: tuple[int, ...]
    boxes: tuple[Box, ...]

    @classmethod
    def of_whole(cls, shape: Sequence[int]) -> Place:
        """The place of a part that is the whole tensor."""
        sizes, zeros = tuple(shape), (0,) * len(shape)
        return cls(sizes, sizes, (Box(zeros, sizes, zeros),))

    @classmethod
    def of_layout(
        cls, shape: Sequence[int], layout: Sequence[tuple[str, Placement | Owned]], mesh: Mesh, rank: int
    ) -> Place:
        """The place of the part that `rank` holds in this layout, as `part_of` cuts it out of the whole tensor."""
        runs, part = [[(0, size)] for size in shape], list(shape)
        for group, placement in layout:
            if isinstance(placement, Shard):
                ways, index = mesh.size(group), mesh.index(group, rank)
                runs[placement.dim] = _divided(runs[placement.dim], part[placement.dim], placement.blocks, ways, index)
                part[placement.dim] = placement.blocks * -(-part[placement.dim] // (placement.blocks * ways))
            elif isinstance(placement, Owned):
                if mesh.index(group, rank) != placement.position:
                    return cls(tuple(shape), (0, *part[1:]), ())
            elif not isinstance(placement, Replicate):
                raise ValueError("a partial sum is not a part of a tensor")
        boxes = []
        for sides in product(*(_placed(each) for each in runs)):
            offsets, sizes, at = zip(*sides, strict=True) if sides else ((), (), ())
            boxes.append(Box(offsets, sizes, at))
        return cls(tuple(shape), tuple(part), tuple(boxes))

    @classmethod
    def of_range(cls, shape: Sequence[int], begin: int, end: int) -> Place:
        """The place of a flat part: the elements `begin` to `end` of the flattened tensor."""
        sizes = tuple(shape)
        boxes, at = [], 0
        for offsets, extent in _boxes_of_range(sizes, begin, end):
            boxes.append(Box(offsets, extent, (at,)))
            at += prod(extent)
        return cls(sizes, (end - begin,), tuple(boxes))

    def boxes_of(self, part: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        """Each box, with the view of `part` that holds it."""
        for box in self.boxes:
            yield box, box.of(part)


def overlap(one: Box, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[list[slice], list[slice]] | None:
    """Where two boxes of one tensor have elements in common: the slices of the first one, and those of the other."""
    of_one, of_other = [], []
    for begin, size, other, length in zip(one.offsets, one.sizes, offsets, sizes, strict=True):
        low, high = max(begin, other), min(begin + size, other + length)
        if low >= high:
            return None
        of_one.append(slice(low - begin, high - begin))
        of_other.append(slice(low - other, high - other))
    return of_one, of_other


def _divided(runs: list[Run], total: int, blocks: int, ways: int, index: int) -> list[Run]:
    """The runs of one of `ways` ranks, where `runs` are divided inside each of so many equal blocks.

    total: the size of what is divided, with padding behind the runs.
    """
    block = total // blocks
    size = -(-block // ways)
    found: list[Run] = []
    for number in range(blocks):
        begin = number * block + index * size
        for run in _cut(runs, begin, begin + size):
            if found and sum(found[-1]) == run[0]:
                found[-1] = found[-1][0], found[-1][1] + run[1]
            else:
                found.append(run)
    return found


def _cut(runs: list[Run], begin: int, end: int) -> Iterator[Run]:
    """What lies between two places that are counted along the runs."""
    at = 0
    for start, size in runs:
        low, high = max(begin, at), min(end, at + size)
        if low < high:
            yield start + low - at, high - low
        at += size


def _placed(runs: list[Run]) -> Iterator[tuple[int, int, int]]:
    """(offset, size, where it begins in the part) of each run."""
    at = 0
    for start, size in runs:
        yield start, size, at
        at += size


def _boxes_of_range(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of boxes whose elements, one after another, are a range of the flattened tensor."""
    if begin >= end:
        return
    if len(shape) < 2:
        yield ((begin,), (end - begin,)) if shape else ((), ())
        return
    row = prod(shape[1:])
    if begin % row == 0 and end % row == 0:
        yield (begin // row, *(0,) * (len(shape) - 1)), ((end - begin) // row, *shape[1:])
    elif begin // row == (end - 1) // row:
        number = begin // row
        for offsets, sizes in _boxes_of_range(shape[1:], begin - number * row, end - number * row):
            yield (number, *offsets), (1, *sizes)
    else:
        top, bottom = -(-begin // row) * row, end // row * row
        for low, high in ((begin, top), (top, bottom), (bottom, end)):
            yield from _boxes_of_range(shape, low, high)
