"""Graphs as plain records, the same from whatever file they were read, and the grammar of one node's line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from commfuse_fx.ir.text.text_lines import argument_tokens

_ORDINAL = re.compile(r"\.\d+$")
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast", "all_to_all")


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


def parse_arguments(text: str, names: Mapping[str, object]) -> tuple[Argument, ...]:
    """The arguments of `f(a, %b, [c, %d])` without the parentheses. Raises UnknownReference, ValueError."""
    found: list[Argument] = []
    pattern: list[str] = []
    operands: list[str] = []
    depth = 0
    for token in argument_tokens(text, names):
        depth += (token == "[") - (token == "]")
        if token == ", " and depth == 0:
            found.append(Argument("".join(pattern), tuple(operands)))
            pattern, operands = [], []
        elif token.startswith("%"):
            pattern.append("%")
            operands.append(token[1:])
        else:
            pattern.append(token)
    if pattern:
        found.append(Argument("".join(pattern), tuple(operands)))
    return tuple(found)


def kind_of_op(op: str) -> str:
    """`all_reduce` of `_c10d_functional.all_reduce_`."""
    label = op.split(".")[1] if "." in op else op
    return next((kind for kind in _KINDS if label.startswith(kind)), label)


def split_members(joined: str) -> tuple[str, ...]:
    return tuple(joined.split(", ")) if joined else ()
