"""Strategies and steps written by the argument names of an op's schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from commfuse_fx.ir.meta import TensorSpec
from commfuse_fx.ir.placement import P, Placement, R, S
from commfuse_fx.kernels.position_random import shift
from commfuse_fx.sharding.rules.call import INDEX, AllReduce, OpCall, Ref, Result, Step, Strategy

aten = torch.ops.aten


def spec_of_argument(call: OpCall, name: str) -> TensorSpec | None:
    """The spec of a tensor argument; None where no tensor was given."""
    value = call.bound()[name]
    return call.inputs[value.index] if isinstance(value, Ref) else None


def strategy(
    call: OpCall,
    placed: Mapping[str, Placement],
    outputs: Sequence[Placement],
    steps: Sequence[Step | AllReduce] = (),
    comm: int = 0,
) -> Strategy:
    """`placed` gives placements of tensor arguments by name; others are replicated. Names without a tensor are ignored,
    and so are placements of outputs that are no tensors."""
    inputs: list[Placement] = [R] * len(call.inputs)
    bound = call.bound()
    for name, placement in placed.items():
        value = bound[name]
        if isinstance(value, Ref):
            inputs[value.index] = placement
    given = (R if spec is None else placement for spec, placement in zip(call.outputs, outputs, strict=True))
    return Strategy(tuple(given), tuple(inputs), tuple(steps), comm=comm)


def changed(call: OpCall, changes: Mapping[str, Any]) -> Step:
    """The same op with some arguments replaced, by name."""
    arguments = call.target._schema.arguments
    bound = {**call.bound(), **changes}
    positional = tuple(bound[argument.name] for argument in arguments if not argument.kwarg_only)
    named = tuple((argument.name, bound[argument.name]) for argument in arguments if argument.kwarg_only)
    return Step(call.target, positional, named)


def on_contiguous(call: OpCall, names: Sequence[str], changes: Mapping[str, Any] | None = None) -> tuple[Step, ...]:
    """Steps that call the op with these tensor arguments made contiguous, and others replaced as `changes` says."""
    steps: list[Step] = []
    replaced: dict[str, Any] = dict(changes or {})
    bound = call.bound()
    for name in names:
        if isinstance(bound[name], Ref):
            replaced[name] = Result(len(steps))
            steps.append(Step(aten.contiguous.default, (bound[name],)))
    return (*steps, changed(call, replaced))


def along(dim: int, spec: TensorSpec | None, whole: Sequence[int]) -> Placement:
    """Where dimension `dim` of the shape `whole` is divided: the placement of an operand that broadcasts to it."""
    if spec is None:
        return R
    own = dim - len(whole) + len(spec.shape)
    return S(own) if own >= 0 and spec.shape[own] == whole[dim] and whole[dim] != 1 else R


def summand(placement: Placement) -> Placement:
    """The placement of the gradient of an operand: whoever holds it whole has only its part of the sum."""
    return P if placement == R else placement


def subdivided(index: Any, ways: int) -> Step:
    """The position of this rank's part where parts, of which this rank has number `index`, are divided once more."""
    return Step(shift, (INDEX, index, ways))
