"""Cut a rank's part out of a whole parameter, and put a whole parameter together from the parts of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.placement import Owned, Placement, Replicate, Shard, assemble, local_shape, take
from commfuse_fx.ir.core.program import Parameter, Program

Layout = tuple[tuple[str, Placement | Owned], ...]
"""Pairs of a group of mesh axes and a placement. The first pair divides the whole tensor, the next one its parts. A
tensor of which one rank owns such a part has the last pair for that."""


def divided_parameters(program: Program) -> dict[str, Parameter]:
    """The parameters of which a rank keeps only a part, or of whose optimizer state it does."""
    params = program.params.items()
    return {name: param for name, param in params if param.shard or dividing(param.layout, program.mesh)}


def dividing(layout: Layout, mesh: Mesh) -> Layout:
    """The entries of a layout that divide anything."""
    return tuple(
        (group, placement)
        for group, placement in layout
        if not isinstance(placement, Replicate) and mesh.size(group) > 1
    )


def joined_group(layout: Layout, mesh: Mesh) -> str:
    """All axes that a layout divides over, as one group, in the order of the mesh."""
    axes = [axis for group, _ in layout for axis in group.split(",")]
    return ",".join(axis for axis in mesh.names if axis in axes)


def holders(layout: Layout, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """The ranks in the joined group of `rank` that hold a part, in the order of the mesh."""
    members = mesh.ranks(joined_group(layout, mesh), rank)
    owned = [(group, placement.position) for group, placement in layout if isinstance(placement, Owned)]
    return tuple(each for each in members if all(mesh.index(group, each) == position for group, position in owned))


def part_of(whole: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """The part of the tensor that `rank` holds, padded with zeros where parts are not equal otherwise.

    Raises ValueError for a layout of partial sums.
    """
    for group, placement in layout:
        ways = mesh.size(group)
        if isinstance(placement, Owned):
            return whole if placement.position == mesh.index(group, rank) else whole.narrow(0, 0, 0)
        whole = take(_padded(whole, placement, ways), placement, ways, mesh.index(group, rank))
    return whole


def whole_of(
    parts: Sequence[torch.Tensor], layout: Layout, mesh: Mesh, rank: int, shape: Sequence[int]
) -> torch.Tensor:
    """The whole tensor of this shape from the parts of all ranks in the joined group of `rank`, in the order of the
    mesh."""
    members = mesh.ranks(joined_group(layout, mesh), rank)
    found = {
        tuple(mesh.index(group, member) for group, _ in layout): part
        for member, part in zip(members, parts, strict=True)
    }
    shapes = [tuple(shape)]
    for group, placement in layout:
        if isinstance(placement, Owned):
            continue
        shapes.append(local_shape(_padded_shape(shapes[-1], placement, mesh.size(group)), placement, mesh.size(group)))
    # Undo the last division first.
    for place_in_layout in reversed(range(len(layout))):
        outer: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for place in sorted(found):
            outer.setdefault(place[:-1], []).append(found[place])
        _, placement = layout[place_in_layout]
        if isinstance(placement, Owned):
            found = {place: siblings[placement.position] for place, siblings in outer.items()}
            continue
        found = {
            place: _without_padding(assemble(siblings, placement), shapes[place_in_layout], placement)
            for place, siblings in outer.items()
        }
    return found[()]


def _padded_shape(shape: Sequence[int], placement: Placement, ways: int) -> tuple[int, ...]:
    if not isinstance(placement, Shard):
        return tuple(shape)
    unit = ways * placement.blocks
    return tuple(-(-size // unit) * unit if dim == placement.dim else size for dim, size in enumerate(shape))


def _padded(whole: torch.Tensor, placement: Placement, ways: int) -> torch.Tensor:
    larger = _padded_shape(whole.shape, placement, ways)
    if larger == whole.shape:
        return whole
    padded = whole.new_zeros(larger)
    padded[tuple(slice(size) for size in whole.shape)] = whole
    return padded


def _without_padding(whole: torch.Tensor, shape: Sequence[int], placement: Placement) -> torch.Tensor:
    return whole.narrow(placement.dim, 0, shape[placement.dim]) if isinstance(placement, Shard) else whole
