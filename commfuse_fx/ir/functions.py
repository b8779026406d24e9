"""Graph nodes that are neither aten ops nor collectives. Code generation binds them to the running rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def pure(function: FunctionT) -> FunctionT:
    """Decorator: the function only computes its result, so a call of it may move, and goes when nobody uses it."""
    function.commfuse_pure = True  # type: ignore[attr-defined]
    return function


@pure
def axis_index(group: str) -> int:
    """This rank's position in the group. The only way in which a graph depends on the rank."""
    raise RuntimeError(f"axis_index({group!r}) has a value only on a rank")


def optimizer_step(params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> Any:
    """Call the user's optimizer on these gradients. Nothing is known of its effects, so nothing moves across it."""
    raise RuntimeError("optimizer_step is bound to the user's optimizer when the step runs")
