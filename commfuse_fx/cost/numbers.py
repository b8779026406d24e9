"""What the planning algorithms share: when two times are equal, and checks of what they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from commfuse_fx.errors import ConfigTypeError, ConfigValueError

EQUAL = 1e-9
"""Relative difference up to which two predicted times count as equal."""


def in_ms(seconds: float) -> str:
    """`12.345 ms`."""
    return f"{seconds * 1e3:.3f} ms"


def in_bytes(nbytes: int) -> str:
    """`12 bytes`, `1.5 KiB`, `40 GiB`: three digits or more."""
    found, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if found < 1024:
            break
        found, unit = found / 1024, larger
    digits = f"{found:.0f}" if found >= 100 else f"{found:.3g}"
    return f"{digits} {unit}"


def check_time(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigTypeError(f"{name} is {value!r}; pass a number")
    if not 0 <= value < inf:
        raise ConfigValueError(f"{name} is {value!r}; pass a finite number of at least 0")


def check_times(name: str, values: Sequence[float]) -> None:
    for index, value in enumerate(values):
        check_time(f"{name}[{index}]", value)


def check_same_length(name: str, values: Sequence[float], other: str, others: Sequence[float]) -> None:
    if len(values) != len(others):
        raise ConfigValueError(f"{name} has {len(values)} entries and {other} {len(others)}; pass one per member")


def alike(one: Mapping[str, float], other: Mapping[str, float], within: float = EQUAL) -> bool:
    """Whether both have the same keys, and values whose relative difference is at most `within`."""
    return one.keys() == other.keys() and all(
        abs(value - other[key]) <= within * max(abs(value), abs(other[key])) for key, value in one.items()
    )
