"""Graphs as plain records, the same from whatever file they were read, and the grammar of one node's line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

RETURN = "(return)"
"""Name and op of the last record; no node can have it."""

_TOKEN = re.compile(r"%|\[|\]|, |,|[^%\[\],]+")
_NAME = re.compile(r"[^\s,\[\]()]+")
_ENDS = re.compile(r"[\s,\])]|$")
_ORDINAL = re.compile(r"\.\d+$")
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a call: its text with `%` for each reference, and the names that these refer to."""

    pattern: str
    operands: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.operands:
            return self.pattern
        parts = self.pattern.split("%")
        names = [f"%{name}" for name in self.operands]
        return "".join(part + name for part, name in zip(parts, [*names, ""], strict=False))

    @property
    def is_out(self) -> bool:
        """Says where the result is written, not what is computed."""
        return self.pattern.startswith("out=")


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """What a collective does. Members are split at ", ", as the text cannot tell more; sizes in bytes."""

    kind: str
    group: str
    reduce_op: str
    dtype: str
    nbytes: int
    fusion_id: int | None
    members: tuple[str, ...]


@dataclass(frozen=True)
class NodeRecord:
    """One line. `extras` are the other remarks in braces."""

    name: str
    phase: str
    op: str
    value: str
    arguments: tuple[Argument, ...]
    collective: CollectiveRecord | None = None
    extras: tuple[Argument, ...] = ()

    @cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(name for argument in self.arguments for name in argument.operands)

    @cached_property
    def pattern(self) -> tuple[str, ...]:
        return tuple(argument.pattern for argument in self.arguments)

    @cached_property
    def module(self) -> str:
        """Module path. Taken from the name, as the text has no other."""
        return self.name.rpartition("/" if "/" in self.name else ".")[0]

    @cached_property
    def leaf(self) -> str:
        """The name inside of the module, without ordinal."""
        own = self.name[len(self.module) :].lstrip("/") if "/" in self.name else self.name.rpartition(".")[2]
        return _ORDINAL.sub("", own)

    @cached_property
    def base_op(self) -> str:
        """The op without overload and without what makes it work in place: `aten.mm` for `aten.mm.out`."""
        return ".".join(self.op.split(".")[:2]).removesuffix("_")


@dataclass(frozen=True)
class GraphRecord:
    """A graph. `label` says where it is from."""

    label: str
    header: Mapping[str, str]
    nodes: tuple[NodeRecord, ...]


class UnknownReference(ValueError):
    """A reference to a node that is not there."""


def parse_arguments(text: str, names: Mapping[str, object]) -> tuple[Argument, ...]:
    """The arguments of `f(a, %b, [c, %d])` without the parentheses. Raises UnknownReference, ValueError."""
    found: list[Argument] = []
    pattern: list[str] = []
    operands: list[str] = []
    depth, at = 0, 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        token = match.group() if match else text[at]
        at += len(token)
        if token == "%":
            name = _reference(text, at, names)
            operands.append(name)
            at += len(name)
        depth += (token == "[") - (token == "]")
        if depth < 0:
            raise ValueError("a bracket is closed that was not opened")
        if token == ", " and depth == 0:
            found.append(Argument("".join(pattern), tuple(operands)))
            pattern, operands = [], []
        else:
            pattern.append(token)
    if depth:
        raise ValueError("a bracket is not closed")
    if pattern:
        found.append(Argument("".join(pattern), tuple(operands)))
    return tuple(found)


def _reference(text: str, at: int, names: Mapping[str, object]) -> str:
    plain = _NAME.match(text, at)
    if plain and plain.group() in names:
        return plain.group()
    # Names of modules may contain nearly anything: the longest one that a delimiter follows.
    best = ""
    for end in _ENDS.finditer(text, at):
        if end.start() - at > 500:
            break
        if text[at : end.start()] in names:
            best = text[at : end.start()]
    if not best:
        raise UnknownReference(plain.group() if plain else "")
    return best


def kind_of_op(op: str) -> str:
    """`all_reduce` of `_c10d_functional.all_reduce_`."""
    label = op.split(".")[1] if "." in op else op
    return next((kind for kind in _KINDS if label.startswith(kind)), label)


def split_members(joined: str) -> tuple[str, ...]:
    return tuple(joined.split(", ")) if joined else ()
