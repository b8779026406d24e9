"""Ops that draw random tensors by position (position_random.py), so that ranks draw parts of the whole tensor.

torch's own random ops have no rule: if ranks drew parts of a tensor with them, its values would change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commfuse_fx.ir.core.placement import R, S
from commfuse_fx.kernels import position_random
from commfuse_fx.sharding.rules.writing.call import INDEX, OpCall, Ref, Result, Step, Strategy
from commfuse_fx.sharding.rules.writing.rule_registry import rule

aten = torch.ops.aten


def _at(starts: Sequence[Any], d: int) -> tuple[Any, ...]:
    """The starts after a division of dimension `d`, whose new start is the result of the first step."""
    return tuple(Result(0) if i == d else start for i, start in enumerate(starts))


def _begin(call: OpCall, start: Any, size: int) -> Step:
    return Step(position_random.shift, (start, INDEX, size // call.ways))


@rule(
    position_random.uniform_at,
    position_random.normal_at,
    position_random.exponential_at,
    position_random.bernoulli_at,
    position_random.randint_at,
)
def filling(call: OpCall) -> Sequence[Strategy]:
    """(shape, parameters..., seed, call, starts, whole_shape, dtype, device): each rank makes its part of the shape."""
    shape, *between, starts, whole_shape, dtype, device = call.args
    found: list[Strategy] = []
    for d, size in enumerate(shape):
        own = tuple(each // call.ways if i == d else each for i, each in enumerate(shape))
        made = Step(call.target, (own, *between, _at(starts, d), whole_shape, dtype, device))
        found.append(Strategy((S(d),), (R,) * len(call.inputs), (_begin(call, starts[d], size), made)))
    return found


@rule(position_random.dropout_at, position_random.bernoulli_of_at)
def drawing_for(call: OpCall) -> Sequence[Strategy]:
    """(tensor, ..., starts, whole_shape): the results are divided as the tensor is."""
    *before, starts, whole_shape = call.args
    tensor = before[0]
    assert isinstance(tensor, Ref)
    found: list[Strategy] = []
    for d, size in enumerate(call.inputs[tensor.index].shape):
        made = Step(call.target, (*before, _at(starts, d), whole_shape))
        inputs = tuple(S(d) if i == tensor.index else R for i in range(len(call.inputs)))
        outputs = (S(d),) * len(call.outputs)
        found.append(Strategy(outputs, inputs, (_begin(call, starts[d], size), made)))
    return found
