"""Whether two ranks captured the same ops, but not in the same order."""

from __future__ import annotations

import re

_REFERENCE = re.compile(r"%[^\s,:()\[\]{}]+")
_ORDINAL = re.compile(r"\.\d+$")


def same_but_for_order(one: str, other: str) -> bool:
    """Whether two texts of a graph have the same lines if order, numbers in names and operands are ignored."""
    return sorted(map(_line, one.splitlines())) == sorted(map(_line, other.splitlines()))


def _line(line: str) -> str:
    name, equals, call = line.partition(" = ")
    if not equals:
        return _REFERENCE.sub("%", line)
    return _ORDINAL.sub("", name.partition(":")[0]) + name.partition(":")[2] + _REFERENCE.sub("%", call)
