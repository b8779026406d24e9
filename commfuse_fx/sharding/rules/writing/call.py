"""The input and the output of a sharding rule: a call of an op, and strategies to divide it over one mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from commfuse_fx.ir.core.bound_arguments import bound_arguments
from commfuse_fx.ir.core.meta import TensorSpec
from commfuse_fx.ir.core.placement import Placement


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to tensor input number `index`, in the arguments of a call."""

    index: int


@dataclass(frozen=True, slots=True)
class Number:
    """A number that a node of the graph computes, such as this rank's position, in the arguments of a call."""

    index: int


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an earlier step of the same strategy, in the arguments of a step.

    step: the number of that step.
    item: which item of the result, if that is a tuple.
    """

    step: int
    item: int | None = None


class Rank(Enum):
    """This rank's position on the axis, an int, in the arguments of a step."""

    INDEX = "index"


INDEX = Rank.INDEX


@dataclass(frozen=True)
class OpCall:
    """A call of one op on whole tensors, for which a rule gives strategies.

    target: the op.
    args, kwargs: its arguments, with a `Ref` in place of every tensor. Lists are tuples, so that calls are hashable.
    inputs: the specs of the tensors, in the order of the arguments, nested lists included.
    outputs: one spec per result; None for a result that is no tensor.
    ways: the number of ranks.
    blocks: the numbers of blocks in which dimensions may be divided, 1 among them. A rule may also return other
        numbers, which arise when dimensions are merged.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec | None, ...]
    ways: int
    blocks: tuple[int, ...] = (1, 2, 3)

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """An argument given by position or by name."""
        if position < len(self.args):
            return self.args[position]
        return dict(self.kwargs).get(name, default)

    def bound(self) -> dict[str, Any]:
        """All arguments by the names of the op's schema, defaults filled in (target has to be an OpOverload)."""
        return bound_arguments(self.target, self.args, dict(self.kwargs))


@dataclass(frozen=True)
class Step:
    """One op that every rank runs on its own parts. Tensors are `Ref`s and `Result`s."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class AllReduce:
    """A step that reduces a tensor over the ranks of the axis.

    op: "sum" or "max".
    """

    value: Ref | Result
    op: str = "sum"


@dataclass(frozen=True)
class Strategy:
    """A strategy is one way to divide an op among the ranks of one mesh axis.

    outputs, inputs: the placement of each result and of each tensor input.
    steps: the steps that every rank runs on its parts; the last one gives the results. Empty: the op itself with its
        own arguments, which is right if no argument is a size of the whole.
    results: the step results that are the outputs, one per output, if the last step does not give all of them.
    comm: the bytes that the steps send, per rank.
    """

    outputs: tuple[Placement, ...]
    inputs: tuple[Placement, ...]
    steps: tuple[Step | AllReduce, ...] = ()
    results: tuple[Result, ...] = ()
    comm: int = 0


Rule = Callable[[OpCall], Sequence[Strategy]]
"""A function that gives the strategies of a call. The strategy that replicates everything is added for every op.

A rule need not check that sizes divide, nor that only floating-point tensors are partial sums. Strategies for which
this fails are dropped."""


def references(value: Any) -> list[Ref]:
    """All `Ref`s in nested arguments, in order."""
    if isinstance(value, Ref):
        return [value]
    if isinstance(value, (tuple, list)):
        return [ref for item in value for ref in references(item)]
    return []


def frozen(value: Any) -> Any:
    """Nested lists as tuples."""
    if isinstance(value, (list, tuple)):
        return tuple(frozen(item) for item in value)
    return value


@dataclass
class CallBuilder:
    """Makes an `OpCall` from arguments that hold real tensors; `tensors` are those, in order."""

    tensors: list[torch.Tensor] = field(default_factory=list)

    def take(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return Ref(len(self.tensors) - 1)
        if isinstance(value, (list, tuple)):
            return tuple(self.take(item) for item in value)
        return value


def call_of(
    target: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None, ways: int = 2
) -> tuple[OpCall, list[torch.Tensor]]:
    """Run `target` on real tensors; returns the call, and its tensors in the order of the inputs."""
    build = CallBuilder()
    taken = tuple(build.take(arg) for arg in args)
    named = tuple((name, build.take(value)) for name, value in (kwargs or {}).items())
    out = target(*args, **(kwargs or {}))
    results = out if isinstance(out, (tuple, list)) else (out,)
    specs = tuple(TensorSpec.of(item) if isinstance(item, torch.Tensor) else None for item in results)
    inputs = tuple(TensorSpec.of(tensor) for tensor in build.tensors)
    return OpCall(target, taken, named, inputs, specs, ways), build.tensors
