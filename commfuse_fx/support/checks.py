"""Checks of arguments that users give; errors name the argument, the value and the fix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from commfuse_fx.errors import ConfigTypeError, ConfigValueError


def show(value: object) -> str:
    """`repr(value)` on one line, cut to what fits an error message."""
    text = " ".join(repr(value).splitlines())
    return text if len(text) <= 200 else f"{text[:197]}..."


def is_int(value: object) -> TypeGuard[int]:
    """Whether `value` is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_bool(value: object, where: str) -> bool:
    """`value` if it is a bool, else ConfigTypeError."""
    if not isinstance(value, bool):
        raise ConfigTypeError(f"{where} is {show(value)}; give True or False")
    return value


def check_int(value: object, where: str, low: int, high: int | None = None, limit: str = "") -> int:
    """`value` if it is an int in `low`..`high` (`limit` says where `high` comes from).

    Raises ConfigTypeError for a bool or non-int, ConfigValueError out of range.
    """
    allowed = f"an int >= {low}" if high is None else f"an int in {low}..{high}{limit}"
    if not is_int(value):
        raise ConfigTypeError(f"{where} is {show(value)}; give {allowed}")
    if value < low or (high is not None and value > high):
        raise ConfigValueError(f"{where} is {value}; give {allowed}")
    return value


def check_choice(value: object, where: str, choices: Sequence[str]) -> str:
    """`value` if it is one of `choices`, else ConfigTypeError (not a str) or ConfigValueError."""
    allowed = ", ".join(f'"{choice}"' for choice in choices)
    if not isinstance(value, str):
        raise ConfigTypeError(f"{where} is {show(value)}; give one of {allowed}")
    if value not in choices:
        raise ConfigValueError(f"{where} is {show(value)}, which is unknown; use one of {allowed}")
    return value
