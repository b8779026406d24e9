"""Strategies and steps written by the argument names of an op's schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from commfuse_fx.ir.core.meta import TensorSpec
from commfuse_fx.ir.core.placement import P, Placement, R
from commfuse_fx.kernels.position_random import shift
from commfuse_fx.sharding.rules.writing.call import INDEX, AllReduce, OpCall, Ref, Result, Step, Strategy
from commfuse_fx.sharding.rules.writing.common import own_dim, place

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
    """A strategy from placements by argument name.

    placed: the placements of tensor arguments; others are replicated. Names without a tensor are ignored.
    outputs: one placement per output. Those of outputs that are no tensors are ignored.
    """
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


def operand_placement(dim: int, spec: TensorSpec | None, whole: Sequence[int]) -> Placement:
    """The placement of an operand that broadcasts to the shape `whole`, if dimension `dim` of that is divided."""
    return R if spec is None or whole[dim] == 1 else place(own_dim(spec.shape, dim, whole))


def summand(placement: Placement) -> Placement:
    """The placement of the gradient of an operand. Ranks that hold the operand whole compute summands of it."""
    return P if placement == R else placement


def subdivided(index: Any, ways: int) -> Step:
    """The step that numbers this rank's part after part number `index` is divided once more, among `ways` ranks."""
    return Step(shift, (INDEX, index, ways))
