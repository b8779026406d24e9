"""Ops that read or write at positions which a tensor gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commfuse_fx.ir.core.placement import P, Placement, R, S
from commfuse_fx.sharding.rules.writing.call import INDEX, OpCall, Ref, Result, Step, Strategy
from commfuse_fx.sharding.rules.writing.common import (
    along,
    aten,
    first_only,
    own_dim,
    place,
    shape_of,
    summed,
    wrap,
)
from commfuse_fx.sharding.rules.writing.positions import Indexing, indexing_of
from commfuse_fx.sharding.rules.writing.rule_registry import rule


@rule(aten.gather.default)
def _gather(call: OpCall) -> Sequence[Strategy]:
    data, index = call.inputs
    rank = len(data.shape)
    dim = wrap(call.args[1], rank)
    found = [summed(call, (P, R))]
    if not rank or not index.shape:
        return found
    for other in range(rank):
        if other == dim:
            found += along(call, (None, dim), (dim,))
        elif data.shape[other] == index.shape[other]:
            found += along(call, (other, other), (other,))
    size = data.shape[dim] // call.ways
    read = Step(aten.gather.default, (Ref(0), dim, Result(0)))
    steps = (*_own_positions(Ref(1), size, call.ways), read, _zero(Result(4), Result(3)))
    return [*found, summed(call, (S(dim), R), steps)]


def _own_positions(index: Ref, size: int, ways: int) -> tuple[Step, ...]:
    """The first steps of a strategy; 0: positions within a part of this size, 3: which of them are other ranks'.

    Negative positions count from the end of the whole.
    """
    local = Step(aten.remainder.Scalar, (index, max(size, 1)))
    part = Step(aten.floor_divide.Scalar, (index, max(size, 1)))
    owner = Step(aten.remainder.Scalar, (Result(1), ways))
    return local, part, owner, Step(aten.ne.Scalar, (Result(2), INDEX))


def _zero(value: Ref | Result, where: Result) -> Step:
    return Step(aten.masked_fill.Scalar, (value, where, 0))


@rule(aten.index_select.default)
def _index_select(call: OpCall) -> Sequence[Strategy]:
    rank = len(call.inputs[0].shape)
    found = [summed(call, (P, R))]
    if not rank or not call.inputs[1].shape:
        return found
    dim = wrap(call.args[1], rank)
    for other in range(rank):
        if other != dim:
            found += along(call, (other, None), (other,))
    return [*found, *(Strategy((S(dim, n),), (R, S(0, n))) for n in call.blocks)]


@rule(aten.scatter.src, aten.scatter_add.default, aten.scatter.value, aten.scatter.reduce, aten.scatter_reduce.two)
def _scatter(call: OpCall) -> Sequence[Strategy]:
    """Writes into input 0 at the positions of input 1: the elements of input 2, if there is one, or a number."""
    target, index = call.inputs[0], call.inputs[1]
    rank = len(target.shape)
    found = _scatter_sums(call)
    if not rank or not index.shape:
        return found
    dim = wrap(call.args[1], rank)
    for other in range(rank):
        if other != dim and all(spec.shape[other] == target.shape[other] for spec in call.inputs):
            found += along(call, (other,) * len(call.inputs), (other,))
    if call.target is not aten.scatter_add.default:
        return found
    if call.inputs[2].shape[dim] == index.shape[dim]:
        for n in call.blocks:
            found += _accumulated(call, (S(dim, n), S(dim, n)))
    if call.inputs[2].shape == index.shape:
        positions = _own_positions(Ref(1), target.shape[dim] // call.ways, call.ways)
        own = _zero(Ref(2), Result(3))  # the others add nothing, wherever that may be
        write = Step(call.target, (Ref(0), dim, Result(0), Result(4)))
        found.append(Strategy((S(dim),), (S(dim), R, R), (*positions, own, write)))
    return found


def _scatter_sums(call: OpCall) -> list[Strategy]:
    # Where positions repeat, ranks may write different elements last: only adding keeps summands together.
    if call.target is aten.scatter_add.default:
        return [summed(call, (P, R, P)), *_accumulated(call, (R, P))[1:]]
    if call.target is aten.scatter.value and call.args[3] == 0:
        return [summed(call, (P, R))]
    return []


def _accumulated(call: OpCall, rest: Sequence[Placement]) -> list[Strategy]:
    """Every rank adds its share of the values to a summand of input 0, or to all of it on the first rank."""
    args = tuple(Result(0) if arg == Ref(0) else arg for arg in call.args)
    steps = (first_only(0), Step(call.target, args, call.kwargs))
    return [summed(call, (P, *rest)), summed(call, (R, *rest), steps)]


@rule(aten.index_add.default)
def _index_add(call: OpCall) -> Sequence[Strategy]:
    found = _written(call)
    rank = len(shape_of(call))
    found += _accumulated(call, (R, P))
    if not rank or not call.inputs[1].shape:
        return found
    dim = wrap(call.args[1], rank)
    for n in call.blocks:
        found += _accumulated(call, (S(0, n), S(dim, n)))
    return found


@rule(aten.index_copy.default, aten.index_fill.int_Scalar)
def _index_copy(call: OpCall) -> Sequence[Strategy]:
    return _written(call)


def _written(call: OpCall) -> list[Strategy]:
    """Dimensions of input 0 other than the one along which input 1 gives positions; input 2 has them too."""
    rank = len(shape_of(call))
    dim = wrap(call.args[1], rank)
    found: list[Strategy] = []
    for other in range(rank):
        if other != dim:
            found += along(call, (other, None, other)[: len(call.inputs)], (other,))
    return found


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(call: OpCall) -> Sequence[Strategy]:
    at = indexing_of(call)
    found = [summed(call, (P, *(R,) * (len(call.inputs) - 1)))]
    if at is None:
        return found
    for dim, after in at.kept:
        found += along(call, (dim, *(None,) * len(at.indices)), (after,))
    for i in range(len(at.positions)):
        found += along(call, (None, *_own(at, i)), (at.first + i,))
    if len(at.indices) == 1:
        found.append(_index_part(call, at))
    return found


def _own(at: Indexing, i: int) -> list[int | None]:
    """For each index tensor the position of dimension i of their common shape; None if it is broadcast along it."""
    return [own_dim(shape, i, at.positions) for shape in at.indices]


def _index_part(call: OpCall, at: Indexing) -> Strategy:
    """The data divided along the one dimension that is indexed: each rank reads what it has, and zeros elsewhere."""
    dim = at.dims[0]
    positions = _own_positions(Ref(1), call.inputs[0].shape[dim] // call.ways, call.ways)
    read = Step(call.target, (Ref(0), _own_indices(call)))
    steps = (*positions, read, _outside(at), _zero(Result(4), Result(5)))
    return summed(call, (S(dim), R), steps)


def _own_indices(call: OpCall) -> tuple[Result | None, ...]:
    return tuple(Result(0) if isinstance(each, Ref) else None for each in call.args[1])


def _outside(at: Indexing) -> Step:
    """The step that gives the mask of other ranks' positions as many dimensions as what is read has after them."""
    after = len(at.result) - at.first - len(at.positions)
    return Step(aten.view.default, (Result(3), (*at.positions, *(1,) * after)))


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(call: OpCall) -> Sequence[Strategy]:
    count = len(call.inputs)
    between: tuple[Placement, ...] = (R,) * (count - 2)
    accumulate = bool(call.arg(3, "accumulate", False))
    found = _accumulated(call, (*between, P)) if accumulate else []
    at = indexing_of(call)
    if at is None:
        return found
    values, result = call.inputs[-1].shape, at.result
    for dim, after in at.kept:
        found += along(call, (dim, *(None,) * (count - 2), own_dim(values, after, result)), (dim,))
    if not accumulate:
        return found
    for i in range(len(at.positions)):
        # Values that are broadcast along the positions are added once for each.
        own: list[Any] = [*_own(at, i), own_dim(values, at.first + i, result)]
        for n in call.blocks:
            found += _accumulated(call, [place(dim, n) for dim in own])
    if len(at.indices) == 1 and values == result:
        dim = at.dims[0]
        positions = _own_positions(Ref(1), call.inputs[0].shape[dim] // call.ways, call.ways)
        write = Step(call.target, (Ref(0), _own_indices(call), Result(5), True))
        steps = (*positions, _outside(at), _zero(Ref(2), Result(4)), write)
        found.append(Strategy((S(dim),), (S(dim), R, R), steps))
    return found
