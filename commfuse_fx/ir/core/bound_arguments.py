"""The arguments of a call by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx


def bound_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call of an OpOverload by the names of its schema, defaults filled in."""
    found: dict[str, Any] = {}
    for position, argument in enumerate(op._schema.arguments):
        if position < len(args) and not argument.kwarg_only:
            found[argument.name] = args[position]
        else:
            found[argument.name] = kwargs.get(argument.name, argument.default_value)
    return found


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """All arguments of a node that calls an OpOverload, by name, defaults filled in."""
    return bound_arguments(node.target, node.args, node.kwargs)


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Let a node that calls an OpOverload have another argument of this name.

    It is written as a trace writes it: by position if the schema allows that, and only where it is not the default.
    """
    bound = {**arguments_of(node), name: value}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    needed = 0
    target: Any = node.target
    for argument in target._schema.arguments:
        given = bound[argument.name]
        is_default = argument.has_default_value() and not isinstance(given, fx.Node) and given == argument.default_value
        if not argument.kwarg_only:
            args.append(given)
            needed = needed if is_default else len(args)
        elif not is_default:
            kwargs[argument.name] = given
    node.args, node.kwargs = tuple(args[:needed]), kwargs
