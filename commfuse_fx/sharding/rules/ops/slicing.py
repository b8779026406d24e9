"""Ops that take parts of a dimension, and their backwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commfuse_fx.ir.core.placement import S
from commfuse_fx.sharding.rules.writing.call import OpCall, Ref, Step, Strategy
from commfuse_fx.sharding.rules.writing.common import (
    all_summed,
    along,
    aten,
    divided,
    scales,
    shape_of,
    unit_of,
    with_argument,
    wrap,
)
from commfuse_fx.sharding.rules.writing.rule_registry import rule


@rule(aten.select.int)
def _select(call: OpCall) -> Sequence[Strategy]:
    rank = len(call.inputs[0].shape)
    taken = wrap(call.args[1], rank)
    found = [all_summed(call)]
    for i, dim in enumerate(dim for dim in range(rank) if dim != taken):
        found += along(call, (dim,), (i,))
    return found


@rule(aten.select_backward.default)
def _select_backward(call: OpCall) -> Sequence[Strategy]:
    result = shape_of(call)
    taken = wrap(call.args[2], len(result))
    found = [all_summed(call)]
    for i, dim in enumerate(dim for dim in range(len(result)) if dim != taken):
        step = with_argument(call, "input_sizes", divided(result, dim, call.ways))
        found += along(call, (i,), (dim,), (step,))
    return found


@rule(aten.select_scatter.default)
def _select_scatter(call: OpCall) -> Sequence[Strategy]:
    rank = len(shape_of(call))
    taken = wrap(call.args[2], rank)
    found = [all_summed(call)]
    for i, dim in enumerate(dim for dim in range(rank) if dim != taken):
        found += along(call, (dim, i), (dim,))
    return found


@rule(aten.slice.Tensor)
def _slice(call: OpCall) -> Sequence[Strategy]:
    given = call.bound()
    whole = call.inputs[0].shape
    dim = wrap(given["dim"], len(whole))
    found = [all_summed(call), *_beside(call, dim, None)]
    window = _window(whole[dim], given["start"], given["end"], given["step"])
    if window is None:
        return found
    begin, end = window
    step = Step(call.target, (Ref(0), dim, begin // call.ways, end // call.ways))
    if end - begin == whole[dim]:
        step = Step(aten.alias.default, (Ref(0),))
    for inner, outer in _stretches(call, whole[dim], begin, end):
        found.append(Strategy((S(dim, inner),), (S(dim, outer),), (step,)))
    return found


@rule(aten.narrow.default)
def _narrow(call: OpCall) -> Sequence[Strategy]:
    whole = call.inputs[0].shape
    dim = wrap(call.args[1], len(whole))
    found = [all_summed(call), *_beside(call, dim, None)]
    begin = call.args[2] + whole[dim] if call.args[2] < 0 else call.args[2]
    end = begin + call.args[3]
    step = Step(aten.slice.Tensor, (Ref(0), dim, begin // call.ways, end // call.ways))
    for inner, outer in _stretches(call, whole[dim], begin, end):
        found.append(Strategy((S(dim, inner),), (S(dim, outer),), (step,)))
    return found


@rule(aten.slice_backward.default)
def _slice_backward(call: OpCall) -> Sequence[Strategy]:
    given = call.bound()
    whole = shape_of(call)
    dim = wrap(given["dim"], len(whole))
    found = [all_summed(call), *_beside(call, dim, "input_sizes")]
    window = _window(whole[dim], given["start"], given["end"], given["step"])
    if window is None:
        return found
    begin, end = window
    sizes = divided(whole, dim, call.ways)
    step = Step(call.target, (Ref(0), sizes, dim, begin // call.ways, end // call.ways, 1))
    if end - begin == whole[dim]:
        step = Step(aten.alias.default, (Ref(0),))
    for inner, outer in _stretches(call, whole[dim], begin, end):
        found.append(Strategy((S(dim, outer),), (S(dim, inner),), (step,)))
    return found


@rule(aten.slice_scatter.default)
def _slice_scatter(call: OpCall) -> Sequence[Strategy]:
    given = call.bound()
    whole = shape_of(call)
    dim = wrap(given["dim"], len(whole))
    found = [all_summed(call)]
    for other in range(len(whole)):
        if other != dim:
            found += along(call, (other, other), (other,))
    window = _window(whole[dim], given["start"], given["end"], given["step"])
    if window is None:
        return found
    begin, end = window
    step = Step(call.target, (Ref(0), Ref(1), dim, begin // call.ways, end // call.ways))
    for inner, outer in _stretches(call, whole[dim], begin, end):
        found.append(Strategy((S(dim, outer),), (S(dim, outer), S(dim, inner)), (step,)))
    return found


def _beside(call: OpCall, taken: int, sizes: str | None) -> list[Strategy]:
    """Other dimensions than the one of which a part is taken; `sizes` names the argument that holds the shape."""
    result = shape_of(call)
    found: list[Strategy] = []
    for dim in range(len(result)):
        if dim != taken:
            steps = () if sizes is None else (with_argument(call, sizes, divided(result, dim, call.ways)),)
            found += along(call, (dim,), (dim,), steps)
    return found


def _window(size: int, start: Any, end: Any, step: Any) -> tuple[int, int] | None:
    """Begin and end of a slice without gaps; None if it has gaps, is empty or does not say in numbers where it is."""
    if not all(value is None or isinstance(value, int) for value in (start, end, step)):
        return None
    begin, stop, stride = slice(start, end, step).indices(size)
    return (begin, stop) if stride == 1 and begin < stop else None


def _stretches(call: OpCall, size: int, begin: int, end: int) -> list[tuple[int, int]]:
    """Numbers of blocks of a slice and of the whole, such that the slice consists of whole blocks."""
    unit = unit_of((size, begin, end))
    inner, outer = (end - begin) // unit, size // unit
    return [(inner * n, outer * n) for n in scales(call, inner, outer)]


@rule(aten.split.Tensor, aten.unsafe_split.Tensor)
def _split(call: OpCall) -> Sequence[Strategy]:
    return _sections(call, Step(call.target, (Ref(0), call.args[1] // call.ways, call.arg(2, "dim", 0))))


@rule(
    aten.split_with_sizes.default,
    aten.unsafe_split_with_sizes.default,
    aten.split_with_sizes_copy.default,
    aten.split.sizes,
)
def _split_with_sizes(call: OpCall) -> Sequence[Strategy]:
    sizes = tuple(size // call.ways for size in call.args[1])
    return _sections(call, Step(call.target, (Ref(0), sizes, call.arg(2, "dim", 0))))


@rule(aten.chunk.default, aten.unsafe_chunk.default)
def _chunk(call: OpCall) -> Sequence[Strategy]:
    dim = wrap(call.arg(2, "dim", 0), len(call.inputs[0].shape))
    sizes = tuple(shape_of(call, i)[dim] // call.ways for i in range(len(call.outputs)))
    return _sections(call, Step(aten.split_with_sizes.default, (Ref(0), sizes, dim)))


def _sections(call: OpCall, step: Step) -> list[Strategy]:
    """`step` divides a part along the dimension that is being cut."""
    whole = call.inputs[0].shape
    cut = wrap(call.arg(2, "dim", 0), len(whole))
    count = len(call.outputs)
    found = [all_summed(call)]
    for dim in range(len(whole)):
        if dim != cut:
            found += along(call, (dim,), (dim,) * count)
    sizes = [shape_of(call, i)[cut] for i in range(count)]
    if 0 in sizes:
        return found
    unit = unit_of(sizes)
    for n in scales(call, whole[cut] // unit):
        outputs = tuple(S(cut, size // unit * n) for size in sizes)
        found.append(Strategy(outputs, (S(cut, whole[cut] // unit * n),), (step,)))
    return found


@rule(aten.unbind.int)
def _unbind(call: OpCall) -> Sequence[Strategy]:
    rank = len(call.inputs[0].shape)
    taken = wrap(call.arg(1, "dim", 0), rank)
    found = [all_summed(call)]
    for i, dim in enumerate(dim for dim in range(rank) if dim != taken):
        found += along(call, (dim,), (i,) * len(call.outputs))
    return found
