"""The arguments of a call by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def bound_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call of an OpOverload by the names of its schema, defaults filled in."""
    found: dict[str, Any] = {}
    for position, argument in enumerate(op._schema.arguments):
        if position < len(args) and not argument.kwarg_only:
            found[argument.name] = args[position]
        else:
            found[argument.name] = kwargs.get(argument.name, argument.default_value)
    return found
