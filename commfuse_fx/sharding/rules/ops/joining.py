"""Ops that put tensors together, repeat them, shift them or pad them."""

from __future__ import annotations

from collections.abc import Sequence

from commfuse_fx.ir.core.placement import R, S
from commfuse_fx.sharding.rules.writing.call import OpCall, Ref, Step, Strategy
from commfuse_fx.sharding.rules.writing.common import all_summed, along, aten, scales, shape_of, unit_of, wrap, wrap_all
from commfuse_fx.sharding.rules.writing.rule_registry import rule


@rule(aten.cat.default)
def _cat(call: OpCall) -> Sequence[Strategy]:
    whole = shape_of(call)
    joined = wrap(call.arg(1, "dim", 0), len(whole))
    # cat skips empty tensors of one dimension, whatever the others are.
    real = [len(spec.shape) == len(whole) and spec.shape != (0,) for spec in call.inputs]
    found = [all_summed(call)]
    for dim in range(len(whole)):
        if dim != joined:
            found += along(call, [dim if one else None for one in real], (dim,))
    sizes = [spec.shape[joined] if one else 0 for spec, one in zip(call.inputs, real, strict=True)]
    unit = unit_of(sizes)
    if unit == 0:
        return found
    for n in scales(call, *(size // unit for size in sizes if size)):
        inputs = tuple(S(joined, size // unit * n) if size else R for size in sizes)
        found.append(Strategy((S(joined, whole[joined] // unit * n),), inputs))
    return found


@rule(aten.stack.default)
def _stack(call: OpCall) -> Sequence[Strategy]:
    rank = len(shape_of(call))
    new = wrap(call.arg(1, "dim", 0), rank)
    found = [all_summed(call)]
    for i, dim in enumerate(dim for dim in range(rank) if dim != new):
        found += along(call, (i,) * len(call.inputs), (dim,))
    return found


@rule(aten.flip.default)
def _flip(call: OpCall) -> Sequence[Strategy]:
    rank = len(shape_of(call))
    return _beside(call, tuple(wrap(dim, rank) for dim in call.args[1]))


@rule(aten.roll.default)
def _roll(call: OpCall) -> Sequence[Strategy]:
    # Without dimensions it rolls the elements of all of them.
    return _beside(call, wrap_all(call.arg(2, "dims", ()), len(shape_of(call))))


@rule(aten.tril.default, aten.triu.default)
def _triangle(call: OpCall) -> Sequence[Strategy]:
    rank = len(shape_of(call))
    return _beside(call, (rank - 2, rank - 1))


def _beside(call: OpCall, taken: Sequence[int]) -> list[Strategy]:
    """A linear op that mixes elements along some dimensions only."""
    found = [all_summed(call)]
    for dim in range(len(shape_of(call))):
        if dim not in taken:
            found += along(call, (dim,), (dim,))
    return found


@rule(aten.constant_pad_nd.default)
def _pad(call: OpCall) -> Sequence[Strategy]:
    rank = len(shape_of(call))
    pairs = list(zip(call.args[1][::2], call.args[1][1::2], strict=True))  # from the last dimension on
    padded = [rank - 1 - i for i, pair in enumerate(pairs) if pair != (0, 0)]
    found = _beside(call, padded)
    return found if call.arg(2, "value", 0) == 0 else found[1:]


@rule(aten.repeat.default)
def _repeat(call: OpCall) -> Sequence[Strategy]:
    whole, source, repeats = shape_of(call), call.inputs[0].shape, call.args[1]
    found = [all_summed(call)]
    for dim, times in enumerate(repeats):
        own = dim - (len(whole) - len(source))
        if own >= 0:
            found += [Strategy((S(dim, n * times),), (S(own, n),)) for n in call.blocks]
        for n in call.blocks:  # each rank makes its share of the copies
            if times % (n * call.ways) == 0:
                fewer = tuple(each // call.ways if at == dim else each for at, each in enumerate(repeats))
                found.append(Strategy((S(dim, n),), (R,), (Step(call.target, (Ref(0), fewer)),)))
    return found


@rule(aten.repeat_interleave.self_int)
def _repeat_interleave(call: OpCall) -> Sequence[Strategy]:
    taken = call.arg(2, "dim")
    step = Step(call.target, (Ref(0), call.args[1], taken))
    if taken is None:
        return [all_summed(call), *(along(call, (0,), (0,), (step,)) if len(call.inputs[0].shape) == 1 else [])]
    found = [all_summed(call)]
    for dim in range(len(shape_of(call))):
        found += along(call, (dim,), (dim,), (step,))
    return found
