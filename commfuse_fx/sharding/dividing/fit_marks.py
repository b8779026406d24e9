"""Fit the strategies of marks to a mesh: choose the axes, or parts of axes, that hold the slices.

Marks count slices before the mesh is known. The logical dimensions of one call are served in the order in which they
first appear. Each takes the first unused axis of its size, else a run of unused axes with that product, else a part of
an axis, outermost first. If marks need parts of an axis, it is split into sub-axes ("dp.0", "dp.1") for all marks.
A rule that looked at more, such as other calls, would move a mark when something else changes.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, prod

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.placement import Placement, R, Shard
from commfuse_fx.sharding.marking.check_shape import check_divides, check_shape
from commfuse_fx.sharding.marking.strategy import Axes, Counts, Layout, Placements, TensorStrategy


@dataclass(frozen=True, slots=True)
class MarkedTensor:
    """One tensor of a marked call.

    label: its name in messages. dims: labels of its logical dimensions, as `logical_dims` gives them.
    """

    label: str
    strategy: TensorStrategy
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    is_output: bool = False


@dataclass(frozen=True, slots=True)
class MarkedCall:
    """Tensors whose strategies are fitted together. place: where the user marked them, `file:line`."""

    members: tuple[MarkedTensor, ...]
    place: str


@dataclass(frozen=True, slots=True, order=True)
class AxisPiece:
    """A part of a mesh axis, which is seen as a product of factors, outermost first.

    axis: the number of the axis. begin: the product of the factors before the piece. end: that product times the size
    of the piece. AxisPiece(axis, 1, n) is a whole axis of size n, and AxisPiece(axis, 1, 2) its outermost factor 2.
    """

    axis: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end // self.begin


@dataclass(frozen=True, slots=True)
class Fitted:
    """The fitted strategy of one tensor.

    divided: the pieces of axes that divide it, in the order of the mesh. decided: the numbers of the axes for which the
    mark says something; others are left open.
    """

    divided: tuple[tuple[AxisPiece, Shard], ...]
    decided: tuple[int, ...]


def resolve(calls: Sequence[MarkedCall], mesh: Mesh) -> tuple[Mesh, list[list[Layout]]]:
    """Split the axes of the mesh as far as the calls need it; returns that mesh, and a layout for each member.

    Raises ConfigValueError, with the mark, its value and a fix, if a strategy does not fit its tensor or the mesh.
    """
    fitted = [fit_call(call, mesh) for call in calls]
    factors = factors_needed(calls, fitted, mesh)
    return refine(mesh, factors), [[_layout(each, mesh, factors) for each in members] for members in fitted]


def refine(mesh: Mesh, factors: Mapping[str, Sequence[int]]) -> Mesh:
    """The same mesh with split axes: factors {"dp": (2, 4)} split dp=8 into dp.0=2 and dp.1=4, outermost first.

    Raises ConfigValueError if the product of an axis' factors is not its size.
    """
    shape: list[int] = []
    names: list[str] = []
    for name, size in zip(mesh.names, mesh.shape, strict=True):
        sizes = tuple(factors.get(name, (size,)))
        if prod(sizes) != size:
            raise ConfigValueError(f"factors of axis {name!r} are {sizes}; give factors whose product is {size}")
        shape.extend(sizes)
        names.extend(_sub_axes(name, len(sizes)))
    return Mesh(tuple(shape), tuple(names), mesh.devices)


def factors_needed(
    calls: Sequence[MarkedCall], fitted: Sequence[Sequence[Fitted]], mesh: Mesh
) -> dict[str, tuple[int, ...]]:
    """The factors of the axes of which some tensor needs only a part, outermost first, by axis name.

    Raises ConfigValueError if two marks cut an axis in ways that do not nest.
    """
    found: dict[str, tuple[int, ...]] = {}
    for axis, (name, size) in enumerate(zip(mesh.names, mesh.shape, strict=True)):
        cuts: dict[int, str] = {}  # where the axis is cut -> the first mark that needs it
        for call, members in zip(calls, fitted, strict=True):
            for member, each in zip(call.members, members, strict=True):
                for piece, _ in each.divided:
                    if piece.axis == axis:
                        cuts.setdefault(piece.begin, f"{member.label} ({call.place})")
                        cuts.setdefault(piece.end, f"{member.label} ({call.place})")
        ends = [1, *sorted(cut for cut in cuts if 1 < cut < size), size]
        for low, high in pairwise(ends):
            if high % low:
                raise ConfigValueError(
                    f"axis {name!r} of size {size} would have to be cut into {low} parts for {cuts[low]} and into "
                    f"{high} parts for {cuts[high]}; give counts of which one divides the other, or a mesh with an "
                    "axis for each"
                )
        if len(ends) > 2:
            found[name] = tuple(high // low for low, high in pairwise(ends))
    return found


def fit_call(call: MarkedCall, mesh: Mesh) -> list[Fitted]:
    """Fit the strategies of one call's tensors to the mesh. Raises ConfigValueError as `resolve` does."""
    for member in call.members:
        _check(member, call.place, mesh)
    chosen: dict[str, tuple[AxisPiece, ...]] = {}
    used: list[AxisPiece] = []
    inputs = [member for member in call.members if not member.is_output]
    for member in inputs:
        for pieces, dim in _pieces_named(member, call.place, mesh):
            chosen.setdefault(member.dims[dim], pieces)
            used.extend(pieces)
    for member in inputs:
        for dim, count in _counted(member):
            label = member.dims[dim]
            if label not in chosen:
                chosen[label] = _allocate(count, dim, member, call.place, used, mesh)
                used.extend(chosen[label])
            elif _size(chosen[label]) != count:
                raise ConfigValueError(
                    f"{call.place}: {member.label} is {member.strategy}, which divides dimension {dim} by {count}, but "
                    f"another tensor of the same call divides the same dimension by {_size(chosen[label])}; give both "
                    "the same count, or 1"
                )
    return [_fit_member(member, call.place, chosen, mesh) for member in call.members]


def _fit_member(member: MarkedTensor, place: str, chosen: Mapping[str, tuple[AxisPiece, ...]], mesh: Mesh) -> Fitted:
    strategy = member.strategy
    every = tuple(range(len(mesh.shape)))
    if not isinstance(strategy, Counts):
        blocks = _blocks(member, place, mesh)
        named = _pieces_named(member, place, mesh)
        divided = [(piece, Shard(dim, blocks.get(piece.axis, 1))) for pieces, dim in named for piece in pieces]
        _check_sizes(member, place, divided)
        decided = every
        if isinstance(strategy, Placements):
            decided = tuple(sorted(_axis(key, member, place, mesh) for key, _ in strategy.by_axis))
        return Fitted(tuple(sorted(divided, key=lambda pair: pair[0])), decided)
    held: dict[int, tuple[AxisPiece, ...]] = {}
    counted = _counted(member)
    for dim, count in counted:
        pieces = chosen.get(member.dims[dim], ())
        if pieces and _size(pieces) == count:
            held[dim] = pieces
    for dim, count in counted:  # of results only: all dimensions of the inputs have been chosen
        if dim not in held:
            held[dim] = _allocate(count, dim, member, place, [p for pieces in held.values() for p in pieces], mesh)
    divided = [(piece, Shard(dim)) for dim, pieces in held.items() for piece in pieces]
    return Fitted(tuple(sorted(divided, key=lambda pair: pair[0])), every)


def _allocate(
    count: int, dim: int, member: MarkedTensor, place: str, used: Sequence[AxisPiece], mesh: Mesh
) -> tuple[AxisPiece, ...]:
    free = _gaps(used, mesh)
    whole = [piece for piece in free if piece.begin == 1 and piece.end == mesh.shape[piece.axis]]
    for piece in whole:
        if piece.size == count:
            return (piece,)
    for first in range(len(whole)):
        for last in range(first + 1, len(whole) + 1):
            run = whole[first:last]
            if run[-1].axis - run[0].axis == len(run) - 1 and _size(run) == count:
                return tuple(run)
    for piece in free:
        if piece.size % count == 0:
            return (AxisPiece(piece.axis, piece.begin, piece.begin * count),)
    found: list[AxisPiece] = []
    left = count
    for piece in free:
        part = gcd(left, piece.size)
        if part > 1:
            found.append(AxisPiece(piece.axis, piece.begin, piece.begin * part))
            left //= part
    if left > 1:
        taken = ", ".join(
            f"{piece.size} of {mesh.names[piece.axis]}={mesh.shape[piece.axis]}" for piece in sorted(used)
        )
        raise ConfigValueError(
            f"{place}: {member.label} is {member.strategy}: {count} slices of dimension {dim} do not fit what is left "
            f"of mesh {mesh}{f', of which other dimensions take {taken}' if taken else ''}; give counts whose product "
            f"over the dimensions of one call divides {mesh.world} along its axes"
        )
    return tuple(found)


def _gaps(used: Sequence[AxisPiece], mesh: Mesh) -> list[AxisPiece]:
    """The unused parts of the axes."""
    found: list[AxisPiece] = []
    for axis, size in enumerate(mesh.shape):
        begin = 1
        for piece in sorted({piece: None for piece in used if piece.axis == axis}):
            if piece.begin > begin:
                found.append(AxisPiece(axis, begin, piece.begin))
            begin = max(begin, piece.end)
        if begin < size:
            found.append(AxisPiece(axis, begin, size))
    return found


def _size(pieces: Sequence[AxisPiece]) -> int:
    return prod(piece.size for piece in pieces)


def _counted(member: MarkedTensor) -> list[tuple[int, int]]:
    """The dimensions that are divided by a count, and the counts."""
    if not isinstance(member.strategy, Counts):
        return []
    return [(dim, count) for dim, count in enumerate(member.strategy.slices) if count > 1]


def _pieces_named(member: MarkedTensor, place: str, mesh: Mesh) -> list[tuple[tuple[AxisPiece, ...], int]]:
    """The whole axes that a strategy names, with the dimension that they divide."""
    strategy = member.strategy
    if isinstance(strategy, Axes):
        by_dim = [[_axis(name, member, place, mesh) for name in names] for names in strategy.names]
    elif isinstance(strategy, Placements):
        by_dim = [[] for _ in member.shape]
        for key, placement in strategy.by_axis:
            if isinstance(placement, Shard):
                by_dim[_dim(placement, member, place)].append(_axis(key, member, place, mesh))
        by_dim = [sorted(axes) for axes in by_dim]
    else:
        return []
    for dim, axes in enumerate(by_dim):
        if axes != sorted(axes):
            names = tuple(mesh.names[axis] for axis in sorted(axes))
            raise ConfigValueError(
                f"{place}: {member.label} is {strategy}, which names the axes of dimension {dim} in another order than "
                f"the mesh {mesh}; write {names}"
            )
    return [
        (tuple(AxisPiece(axis, 1, mesh.shape[axis]) for axis in axes), dim) for dim, axes in enumerate(by_dim) if axes
    ]


def _blocks(member: MarkedTensor, place: str, mesh: Mesh) -> dict[int, int]:
    """Axis number -> blocks of the dimension that it divides."""
    if not isinstance(member.strategy, Placements):
        return {}
    pairs = member.strategy.by_axis
    return {
        _axis(key, member, place, mesh): placement.blocks for key, placement in pairs if isinstance(placement, Shard)
    }


def _axis(name: str | int, member: MarkedTensor, place: str, mesh: Mesh) -> int:
    if isinstance(name, int):
        return name % len(mesh.shape)
    if name not in mesh.names:
        near = difflib.get_close_matches(name, mesh.names, 1)
        raise ConfigValueError(
            f"{place}: {member.label} is {member.strategy}, which names no mesh axis: {name!r}; axes are "
            f"{', '.join(mesh.names)}{f' (did you mean {near[0]!r}?)' if near else ''}"
        )
    return mesh.names.index(name)


def _dim(placement: Shard, member: MarkedTensor, place: str) -> int:
    ndim = len(member.shape)
    if not -ndim <= placement.dim < ndim:
        raise ConfigValueError(
            f"{place}: {member.label} is {member.strategy}, which divides dimension {placement.dim}, but the tensor "
            f"has shape {member.shape}; give a dimension in {-ndim}..{ndim - 1}"
        )
    return placement.dim % ndim


def _check(member: MarkedTensor, place: str, mesh: Mesh) -> None:
    strategy = member.strategy
    check_shape(strategy, member.shape, f"{place}: {member.label}")
    if isinstance(strategy, Placements):
        if strategy.total is not None and strategy.total != len(mesh.shape):
            raise ConfigValueError(
                f"{place}: {member.label} is {strategy}: {strategy.total} placements, but mesh {mesh} has "
                f"{len(mesh.shape)} axes; give one placement per axis, None for an axis to be left open"
            )
        for key, _ in strategy.by_axis:
            _axis(key, member, place, mesh)  # which refuses unknown names
    if isinstance(strategy, Counts):
        slices = prod(strategy.slices)
        if mesh.world % slices:
            raise ConfigValueError(
                f"{place}: {member.label} is {strategy}: {slices} slices in all, which does not divide the world of "
                f"{mesh.world} ranks (mesh {mesh}); give counts whose product divides {mesh.world}"
            )


def _check_sizes(member: MarkedTensor, place: str, divided: Sequence[tuple[AxisPiece, Shard]]) -> None:
    for dim in dict.fromkeys(placement.dim for _, placement in divided):
        count = prod(piece.size for piece, placement in divided if placement.dim == dim)
        blocks = max(placement.blocks for _, placement in divided if placement.dim == dim)
        check_divides(count, blocks, dim, member.strategy, member.shape, f"{place}: {member.label}")


def _layout(fitted: Fitted, mesh: Mesh, factors: Mapping[str, Sequence[int]]) -> Layout:
    found: list[tuple[str, Placement]] = []
    for axis in fitted.decided:
        name, begin = mesh.names[axis], 1
        sizes = factors.get(name, (mesh.shape[axis],))
        for sub_axis, size in zip(_sub_axes(name, len(sizes)), sizes, strict=True):
            inside = [
                shard for piece, shard in fitted.divided if piece.axis == axis and piece.begin <= begin < piece.end
            ]
            found.append((sub_axis, inside[0] if inside else R))
            begin *= size
    return Layout(tuple(found))


def _sub_axes(name: str, number: int) -> list[str]:
    return [name] if number == 1 else [f"{name}.{i}" for i in range(number)]
