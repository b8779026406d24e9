"""Ops that gather or scatter the rows of several members of a bucket, which lie one behind the other in its memory.

A collective over ranks wants a table with a row for each rank. As one table, a bucket has its members interleaved: a
row holds what all members have of a rank. Here each member is a table of its own, as a parameter or a gradient is
whose rows ranks share, so that it can be computed in its place, and used there. A message is made of any stretch of
what a rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from commfuse_fx.ir.core.meta import Stretch

_library = torch.library.Library("commfuse", "FRAGMENT")
_library.define("all_gather_members(Tensor x, int group_size, str group, int[] sizes) -> Tensor")
_library.define("reduce_scatter_members(Tensor x, str op, int group_size, str group, int[] sizes) -> Tensor")
torch.library.register_fake(
    "commfuse::all_gather_members",
    lambda x, group_size, group, sizes: x.new_empty(x.numel() * group_size),
    lib=_library,
)
torch.library.register_fake(
    "commfuse::reduce_scatter_members",
    lambda x, op, group_size, group, sizes: x.new_empty(x.numel() // group_size),
    lib=_library,
)

all_gather_members = torch.ops.commfuse.all_gather_members.default
"""([n_1 | n_2 | ...], W, group, (n_1, n_2, ...)) -> [W n_1 | W n_2 | ...]: the rows of all ranks of each member."""

reduce_scatter_members = torch.ops.commfuse.reduce_scatter_members.default
"""([W n_1 | W n_2 | ...], op, W, group, (n_1, n_2, ...)) -> [n_1 | n_2 | ...]: this rank's rows of each member."""


@dataclass(frozen=True)
class Tables:
    """Flat memory with a table of `ways` rows for each member. sizes: the elements of a row of each."""

    sizes: tuple[int, ...]
    ways: int

    @property
    def all(self) -> Stretch:
        """Of a row, what all members have."""
        return Stretch(0, sum(self.sizes))

    def is_table(self, stretch: Stretch) -> bool:
        """Whether the stretch is all of one member, and so a table in memory."""
        begin = 0
        for size in self.sizes:
            if begin >= stretch.begin:
                return size > 0 and stretch == Stretch(begin, begin + size)
            begin += size
        return False

    def columns(self, memory: torch.Tensor, stretch: Stretch) -> list[torch.Tensor]:
        """The part of each table that belongs to a stretch of a rank's elements, as views of the memory."""
        found: list[torch.Tensor] = []
        begin = 0
        for size in self.sizes:
            low, high = max(stretch.begin - begin, 0), min(stretch.end - begin, size)
            if low < high:
                table = memory[begin * self.ways : (begin + size) * self.ways].view(self.ways, size)
                found.append(table[:, low:high])
            begin += size
        return found

    def message(self, memory: torch.Tensor, stretch: Stretch) -> torch.Tensor:
        """A stretch of all ranks' elements as one table: the memory itself where it is one there, else a copy."""
        found = self.columns(memory, stretch)
        if self.is_table(stretch):
            return found[0]
        return torch.cat(found, 1) if found else memory.new_empty((self.ways, 0))

    def put(self, memory: torch.Tensor, stretch: Stretch, message: torch.Tensor) -> None:
        """Write such a table back to where its elements belong."""
        found = self.columns(memory, stretch)
        for columns, part in zip(found, message.split([each.shape[1] for each in found], 1), strict=True):
            columns.copy_(part)


def cut(sizes: Sequence[int], stretch: Stretch, size: int) -> list[Stretch]:
    """A stretch that is at least twice as large as `size` in several ones of about this size: whole members where
    these are no larger, and equal parts of others."""
    if stretch.size < 2 * size:
        return [stretch]
    ends: list[int] = []
    begin = end = stretch.begin  # of the present part, without the present member
    reached = 0
    for each in sizes:
        reached += each
        until = min(reached, stretch.end)
        if until <= stretch.begin:
            continue
        if until - begin > size and end - begin >= size / 2:
            ends.append(end)
            begin = end
        parts = max(round((until - begin) / size), 1)
        if parts > 1:
            ends += [begin + (until - begin) * (i + 1) // parts for i in range(parts)]
            begin = until
        end = until
        if end == stretch.end:
            break
    if end > begin:
        ends.append(end)
    return [Stretch(low, high) for low, high in pairwise([stretch.begin, *ends])]
