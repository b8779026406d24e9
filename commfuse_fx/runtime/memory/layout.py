"""Cut a rank's part out of a whole parameter, and put a whole parameter together from the parts of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commfuse_fx.ir.mesh import Mesh
from commfuse_fx.ir.placement import Placement, Replicate, assemble, take
from commfuse_fx.ir.program import Parameter, Program

Layout = tuple[tuple[str, Placement], ...]
"""Pairs of a group of mesh axes and a placement. The first pair divides the whole tensor, the next one its parts."""


def divided_parameters(program: Program) -> dict[str, Parameter]:
    """The parameters of which a rank keeps only a part."""
    return {name: param for name, param in program.params.items() if dividing(param.layout, program.mesh)}


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


def part_of(whole: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """The part of the tensor that `rank` holds. Raises ValueError for a layout of partial sums."""
    for group, placement in layout:
        whole = take(whole, placement, mesh.size(group), mesh.index(group, rank))
    return whole


def whole_of(parts: Sequence[torch.Tensor], layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """The whole tensor from the parts of all ranks in the joined group of `rank`, in the order of the mesh."""
    members = mesh.ranks(joined_group(layout, mesh), rank)
    found = {
        tuple(mesh.index(group, member) for group, _ in layout): part
        for member, part in zip(members, parts, strict=True)
    }
    # Undo the last division first.
    for _, placement in reversed(layout):
        outer: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for place in sorted(found):
            outer.setdefault(place[:-1], []).append(found[place])
        found = {place: assemble(siblings, placement) for place, siblings in outer.items()}
    return found[()]
