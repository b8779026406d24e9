"""Checks of arguments that users give; errors name the argument, the value and the fix."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Sequence
from typing import TypeGuard

from commfuse_fx.errors import ConfigTypeError, ConfigValueError


def show(value: object) -> str:
    """`repr(value)` on one line, cut to what fits an error message; a path as its text."""
    text = " ".join(repr(os.fspath(value) if isinstance(value, os.PathLike) else value).splitlines())
    return text if len(text) <= 200 else f"{text[:197]}..."


def alternatives(name: object, known: Sequence[str]) -> str:
    """The end of an error for an unknown name: the known one that it resembles, and all of them."""
    near = difflib.get_close_matches(name, known, 1) if isinstance(name, str) else []
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"{hint}; use one of {', '.join(known)}"


def is_int(value: object) -> TypeGuard[int]:
    """Whether `value` is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_bool(value: object, where: str) -> bool:
    """`value` if it is a bool, else ConfigTypeError."""
    if not isinstance(value, bool):
        raise ConfigTypeError(f"{where} is {show(value)}; give True or False")
    return value


def check_int(value: object, where: str, low: int, high: int | None = None, limit: str = "") -> int:
    """`value` if it is an int in `low`..`high` (`limit` says more of it, such as where `high` comes from).

    Raises ConfigTypeError for a bool or non-int, ConfigValueError out of range.
    """
    allowed = (f"an int >= {low}" if high is None else f"an int in {low}..{high}") + limit
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


def check_number(value: object, where: str, *, positive: bool = False) -> float:
    """`value` as a finite float >= 0 (> 0 with `positive`). Raises ConfigTypeError or ConfigValueError."""
    allowed = "a finite number > 0" if positive else "a finite number >= 0"
    if not isinstance(value, float) and not is_int(value):
        raise ConfigTypeError(f"{where} is {show(value)}; give {allowed}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        raise ConfigValueError(f"{where} is {show(value)}; give {allowed}")
    return number


def check_text(value: object, where: str, *, empty: bool = False) -> str:
    """`value` if it is a str, non-empty unless `empty`. Raises ConfigTypeError or ConfigValueError."""
    if not isinstance(value, str):
        raise ConfigTypeError(f"{where} is {show(value)}; give a str")
    if not value and not empty:
        raise ConfigValueError(f"{where} is empty; give a name")
    if not is_unicode(value):
        raise ConfigValueError(f"{where} is {show(value)}, which has half of a surrogate pair; give whole characters")
    return value


def is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8. JSON may name half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def rows_that_divide(rows: int, ways: int) -> str:
    """What to do with a batch of so many rows, which does not divide among so many ranks."""
    pad = f"pad it to {rows + -rows % ways} rows"
    return f"{pad}, or cut it to {rows - rows % ways}" if rows > ways else pad
