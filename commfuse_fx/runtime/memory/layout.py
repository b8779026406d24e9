"""A parameter's part on each rank of a mesh, and the whole from the parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commfuse_fx.ir.mesh import Mesh
from commfuse_fx.ir.placement import Placement, Replicate, assemble, take
from commfuse_fx.ir.program import Parameter, Program

Layout = tuple[tuple[str, Placement], ...]
"""(group of mesh axes, placement): the first divides the whole tensor, the next its parts."""


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
    """The part of a rank. Raises ValueError for a layout of partial sums."""
    for group, placement in layout:
        whole = take(whole, placement, mesh.size(group), mesh.index(group, rank))
    return whole


def whole_of(parts: Sequence[torch.Tensor], layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """The whole tensor from the parts of the ranks of the joined group that `rank` is in, in the group's order."""
    members = mesh.ranks(joined_group(layout, mesh), rank)
    found = {
        tuple(mesh.index(group, member) for group, _ in layout): part
        for member, part in zip(members, parts, strict=True)
    }
    # Inner divisions first: what they divided is a part of the one before.
    for _, placement in reversed(layout):
        outer: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for place in sorted(found):
            outer.setdefault(place[:-1], []).append(found[place])
        found = {place: assemble(siblings, placement) for place, siblings in outer.items()}
    return found[()]
