"""Which calls draw from a random generator. An op that can draw does not with every argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

_DRAWS_ABOVE_ZERO = ("dropout_p", "dropout")
_DRAWS_IF_TRUE = ("train", "training")


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether this node changes the state of a random generator: dropout in training, but no attention without it."""
    return node.op == "call_function" and call_draws(node.target, node.args, node.kwargs)


def call_draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The same of a call with these arguments, given as to the op."""
    if not can_draw(target):
        return False
    for name, position, default in _switches(target):
        value = kwargs[name] if name in kwargs else args[position] if position < len(args) else default
        if name in _DRAWS_IF_TRUE and value is False:
            return False
        if name in _DRAWS_ABOVE_ZERO and isinstance(value, (int, float)) and value == 0:
            return False
    return True


@cache
def can_draw(target: Any) -> bool:
    """Whether some call of this op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


@cache
def _switches(target: Any) -> tuple[tuple[str, int, Any], ...]:
    """Name, position and default of the arguments of one of torch's ops that say whether it draws.

    A user's own op is taken to draw always: its arguments may mean anything.
    """
    if getattr(target, "namespace", "") != "aten":
        return ()
    named = (*_DRAWS_ABOVE_ZERO, *_DRAWS_IF_TRUE)
    return tuple(
        (argument.name, position, argument.default_value if argument.has_default_value() else None)
        for position, argument in enumerate(target._schema.arguments)
        if argument.name in named
    )
