"""Helpers of sharding rules: they make strategies from dimensions that are divided together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd
from typing import Any

import torch

from commfuse_fx.ir.core.functions import pure
from commfuse_fx.ir.core.meta import TensorSpec
from commfuse_fx.ir.core.placement import P, Placement, R, S
from commfuse_fx.sharding.rules.writing.call import INDEX, AllReduce, OpCall, Ref, Step, Strategy

aten = torch.ops.aten

Steps = tuple[Step | AllReduce, ...]


def scales(call: OpCall, *ratios: int) -> list[int]:
    """All n such that n, or n times one of the ratios, is a number of blocks of this call."""
    found = dict.fromkeys(call.blocks)
    for ratio in ratios:
        found |= dict.fromkeys(n // ratio for n in call.blocks if n % ratio == 0)
    return sorted(found)


def place(dim: int | None, blocks: int = 1) -> Placement:
    """Divided along a dimension, or replicated."""
    return R if dim is None else S(dim, blocks)


def along(
    call: OpCall, inputs: Sequence[int | None], outputs: Sequence[int | None], steps: Steps = ()
) -> list[Strategy]:
    """Strategies that divide one dimension in all tensors that have it.

    inputs, outputs: the position of the dimension in each tensor; None for a tensor that does not have it.
    """
    return [
        Strategy(tuple(place(dim, n) for dim in outputs), tuple(place(dim, n) for dim in inputs), steps)
        for n in call.blocks
    ]


def summed(call: OpCall, inputs: Sequence[Placement], steps: Steps = ()) -> Strategy:
    """The strategy with these inputs whose outputs are all partial sums."""
    return Strategy((P,) * len(call.outputs), tuple(inputs), steps)


def all_summed(call: OpCall) -> Strategy:
    """The strategy of partial sums for an op that is linear in all its inputs together."""
    return summed(call, (P,) * len(call.inputs))


def shape_of(call: OpCall, output: int = 0) -> tuple[int, ...]:
    """Shape of an output that is a tensor."""
    return tensor_of(call, output).shape


def tensor_of(call: OpCall, output: int = 0) -> TensorSpec:
    """Spec of an output that is a tensor."""
    spec = call.outputs[output]
    assert spec is not None, f"{call.target}: output {output} is no tensor"
    return spec


def wrap(dim: int, rank: int) -> int:
    """A dimension counted from the front."""
    return dim % rank if rank else 0


def wrap_all(dims: int | Iterable[int] | None, rank: int) -> tuple[int, ...]:
    """Dimensions counted from the front; none given means all."""
    if dims is None:
        return tuple(range(rank))
    if isinstance(dims, int):
        return (wrap(dims, rank),)
    found = tuple(wrap(dim, rank) for dim in dims)
    return found or tuple(range(rank))


def own_dim(shape: Sequence[int], dim: int, whole: Sequence[int]) -> int | None:
    """The dimension of an input under dimension `dim` of the shape to which it is broadcast.

    None if the input does not have the dimension, or has it with another size.
    """
    own = dim - (len(whole) - len(shape))
    return own if own >= 0 and shape[own] == whole[dim] else None


def divided(shape: Sequence[int], dim: int | None, ways: int) -> tuple[int, ...]:
    """Shape of a part."""
    return tuple(size // ways if at == dim else size for at, size in enumerate(shape))


def keeps_sums(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether converting summands from `before` to `after` loses no precision."""
    if not (after.is_floating_point or after.is_complex):
        return False
    return before == after or (before.itemsize < after.itemsize and before.is_complex <= after.is_complex)


def unit_of(sizes: Iterable[int]) -> int:
    """The greatest common divisor of these sizes."""
    return gcd(*sizes)


@pure
def on_first(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """The tensor on rank 0, zeros on the others: a summand of what every rank has."""
    return tensor.clone() if index == 0 else torch.zeros_like(tensor)


def first_only(index: int) -> Step:
    """The step that turns a replicated input into a partial sum."""
    return Step(on_first, (Ref(index), INDEX))


def with_argument(call: OpCall, name: str, value: Any) -> Step:
    """The op itself with another value of one argument."""
    names = [argument.name for argument in call.target._schema.arguments]
    at = names.index(name)
    if at < len(call.args):
        return Step(call.target, (*call.args[:at], value, *call.args[at + 1 :]), call.kwargs)
    kwargs = tuple((key, given) for key, given in call.kwargs if key != name)
    return Step(call.target, call.args, (*kwargs, (name, value)))
