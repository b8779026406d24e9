"""Ops that give a tensor another shape or order of dimensions, elements unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from commfuse_fx.ir.core.placement import Shard
from commfuse_fx.sharding.rules.writing.call import OpCall, Ref, Step, Strategy
from commfuse_fx.sharding.rules.writing.common import (
    all_summed,
    along,
    aten,
    divided,
    own_dim,
    shape_of,
    wrap,
    wrap_all,
)
from commfuse_fx.sharding.rules.writing.rule_registry import rule

Shape = Sequence[int]


@rule(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.view_copy.default,
    aten._reshape_alias.default,
)
def _view(call: OpCall) -> Sequence[Strategy]:
    result = shape_of(call)
    # Strides of parts are not those of the whole.
    target = aten.view.default if call.target is aten._reshape_alias.default else call.target
    found = [all_summed(call)]
    for before, after in reshapings(call.inputs[0].shape, result, call.ways, call.blocks):
        step = Step(target, (Ref(0), divided(result, after.dim, call.ways)))
        found.append(Strategy((after,), (before,), (step,)))
    return found


def reshapings(before: Shape, after: Shape, ways: int, blocks: Sequence[int]) -> list[tuple[Shard, Shard]]:
    """Pairs of placements of a tensor before and after a reshape, such that reshaping parts gives parts.

    In the order of its elements, a divided tensor consists of `outer` stretches, and each stretch is divided among the
    ranks. For S(d; blocks), `outer` is blocks times the product of the dimensions before d. So `outer` alone decides
    which rank has which elements, whatever the shape. All values of `outer` are tried that have one of the numbers of
    blocks before or after the reshape.
    """
    if prod(before) == 0:
        return []
    outers = sorted({prod(shape[:dim]) * n for shape in (before, after) for dim in range(len(shape)) for n in blocks})
    pairs = [(shard_with(before, outer, ways), shard_with(after, outer, ways)) for outer in outers]
    return [(one, other) for one, other in pairs if one is not None and other is not None]


def shard_with(shape: Shape, outer: int, ways: int) -> Shard | None:
    """The placement that divides each of `outer` equal stretches of the tensor's elements; None if there is none."""
    before = 1
    for dim, size in enumerate(shape):
        if outer % before == 0 and size % (outer // before * ways) == 0:
            return Shard(dim, outer // before)
        before *= size
    return None


@rule(aten.view.dtype, aten.view_copy.dtype)
def _view_as_dtype(call: OpCall) -> Sequence[Strategy]:
    pairs = enumerate(zip(call.inputs[0].shape, shape_of(call), strict=True))
    return [each for dim, (before, after) in pairs if before == after for each in _same(call, dim)]


def _same(call: OpCall, dim: int) -> list[Strategy]:
    return along(call, (dim,), (dim,))


@rule(aten.view_as_real.default, aten.view_as_complex.default)
def _complex_pairs(call: OpCall) -> Sequence[Strategy]:
    """Numbers and pairs in a last dimension."""
    rank = min(len(call.inputs[0].shape), len(shape_of(call)))
    return [all_summed(call), *(each for dim in range(rank) for each in _same(call, dim))]


@rule(aten.expand.default)
def _expand(call: OpCall) -> Sequence[Strategy]:
    whole = shape_of(call)
    found = [all_summed(call)]
    for dim in range(len(whole)):
        step = Step(call.target, (Ref(0), divided(whole, dim, call.ways)), call.kwargs)
        found += along(call, (own_dim(call.inputs[0].shape, dim, whole),), (dim,), (step,))
    return found


@rule(aten.t.default)
def _t(call: OpCall) -> Sequence[Strategy]:
    return _permuted(call, tuple(reversed(range(len(shape_of(call))))))


@rule(aten.transpose.int)
def _transpose(call: OpCall) -> Sequence[Strategy]:
    rank = len(shape_of(call))
    order = list(range(rank))
    if rank:
        one, other = wrap(call.args[1], rank), wrap(call.args[2], rank)
        order[one], order[other] = order[other], order[one]
    return _permuted(call, order)


@rule(aten.permute.default)
def _permute(call: OpCall) -> Sequence[Strategy]:
    rank = len(shape_of(call))
    return _permuted(call, tuple(wrap(dim, rank) for dim in call.args[1]))


@rule(aten.movedim.int, aten.movedim.intlist)
def _movedim(call: OpCall) -> Sequence[Strategy]:
    rank = len(shape_of(call))
    sources, targets = wrap_all(call.args[1], rank), wrap_all(call.args[2], rank)
    moved = dict(zip(targets, sources, strict=True))
    rest = iter(dim for dim in range(rank) if dim not in sources)
    return _permuted(call, tuple(moved[dim] if dim in moved else next(rest) for dim in range(rank)))


def _permuted(call: OpCall, order: Sequence[int]) -> list[Strategy]:
    """Dimension i of the result is dimension order[i] of the input."""
    return [all_summed(call), *(each for i, dim in enumerate(order) for each in along(call, (dim,), (i,)))]


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(call: OpCall) -> Sequence[Strategy]:
    shape = call.inputs[0].shape
    rank = len(shape)
    named = call.arg(1, "dim")
    asked = wrap_all(named, rank) if named != () else ()
    gone = tuple(dim for dim in asked if dim < rank and shape[dim] == 1)
    # By name, since a dimension may have size 1 in a part only.
    step = Step(aten.squeeze.dims, (Ref(0), gone)) if gone else Step(aten.alias.default, (Ref(0),))
    kept = [dim for dim in range(rank) if dim not in gone]
    found = [all_summed(call)]
    for i, dim in enumerate(kept):
        found += along(call, (dim,), (i,), (step,))
    return found


@rule(aten.unsqueeze.default)
def _unsqueeze(call: OpCall) -> Sequence[Strategy]:
    rank = len(shape_of(call))
    new = wrap(call.args[1], rank)
    found = [all_summed(call)]
    for i, dim in enumerate(dim for dim in range(rank) if dim != new):
        found += along(call, (i,), (dim,))
    return found


@rule(aten.unfold.default)
def _unfold(call: OpCall) -> Sequence[Strategy]:
    rank = len(call.inputs[0].shape)
    taken = wrap(call.args[1], rank)
    return [all_summed(call), *(each for dim in range(rank) if dim != taken for each in _same(call, dim))]


@rule(aten.diagonal.default)
def _diagonal(call: OpCall) -> Sequence[Strategy]:
    found = [all_summed(call)]
    for i, dim in enumerate(_off_diagonal(call, len(call.inputs[0].shape))):
        found += along(call, (dim,), (i,))
    return found


@rule(aten.diagonal_backward.default)
def _diagonal_backward(call: OpCall) -> Sequence[Strategy]:
    result = shape_of(call)
    found = [all_summed(call)]
    for i, dim in enumerate(_off_diagonal(call, len(result))):
        step = Step(call.target, (Ref(0), divided(result, dim, call.ways), *call.args[2:]), call.kwargs)
        found += along(call, (i,), (dim,), (step,))
    return found


def _off_diagonal(call: OpCall, rank: int) -> list[int]:
    taken = (wrap(call.bound()["dim1"], rank), wrap(call.bound()["dim2"], rank))
    return [dim for dim in range(rank) if dim not in taken]


@rule(aten.unfold_backward.default)
def _unfold_backward(call: OpCall) -> Sequence[Strategy]:
    result = shape_of(call)
    taken = wrap(call.args[2], len(result))
    found = [all_summed(call)]
    for dim in range(len(result)):
        if dim != taken:
            step = Step(call.target, (Ref(0), divided(result, dim, call.ways), *call.args[2:]), call.kwargs)
            found += along(call, (dim,), (dim,), (step,))
    return found
