"""Graph nodes that are neither aten ops nor collectives. Code generation binds them to the running rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""Name -> function of every function that a graph may call, so that saved graphs can be read."""


def in_graphs(function: FunctionT) -> FunctionT:
    """Decorator: graphs may call the function. Raises ValueError when another one has its name."""
    if FUNCTIONS.setdefault(function.__name__, function) is not function:
        raise ValueError(f"graphs call another function of the name {function.__name__!r}; rename this one")
    return function


@dataclass(frozen=True)
class InnerOps:
    """The ops of torch that a call of a function runs one after another.

    count: how many they are, without views.
    passes: how often they read or write memory of the size of the first result, whose elements count 4 bytes at least.
    """

    count: int
    passes: int


def pure(function: FunctionT, inner: InnerOps | None = None) -> FunctionT:
    """Decorator: the function only computes its result, so a call of it may move, and goes when nobody uses it.

    inner: what it runs; None for a function that costs as much as one op of its arguments and results.
    """
    function.commfuse_pure = True  # type: ignore[attr-defined]
    function.commfuse_inner = inner  # type: ignore[attr-defined]
    return in_graphs(function)


@pure
def axis_index(group: str) -> int:
    """This rank's position in the group. The only way in which a graph depends on the rank."""
    raise RuntimeError(f"axis_index({group!r}) has a value only on a rank")


@in_graphs
def hand_over(outputs: Sequence[torch.Tensor]) -> Any:
    """Where the forward ends: the caller gets the outputs, and later gives the gradients of those that have one.

    Returns a list of these gradients. Nothing moves across it.
    """
    raise RuntimeError("hand_over stands for the way through the caller's code when the graph runs")


@in_graphs
def optimizer_step(params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> Any:
    """Call the user's optimizer on these gradients. Nothing is known of its effects, so nothing moves across it."""
    raise RuntimeError("optimizer_step is bound to the user's optimizer when the step runs")
