"""The grammar of canonical text: the header, the line of a node, and the tokens of a call's arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.core.naming import PHASE_TAG

RETURN = "(return)"
"""Name of the last line; no node can have it."""

Numbered = tuple[int, str]
"""A line and its number."""

ErrorAt = Callable[[int, str], ConfigValueError]
"""(number of a line, what is wrong with it) -> the error to raise."""

_PHASES = {tag: phase for phase, tag in PHASE_TAG.items()}
_VALUE = re.compile(r"[\w\[\](),.* -]+ = ")
_OP = re.compile(r"[\w.]+")
_TOKEN = re.compile(r"%|\[|\]|, |,|[^%\[\],]+")
_NAME = re.compile(r"[^\s,\[\]()]+")
_ENDS = re.compile(r"[\s,\])]|$")
_SENDS = re.compile(r"sends (?P<start>.+) \[(?P<begin>\d{1,18}):(?P<end>\d{1,18})\]")
_COLLECTIVE = re.compile(
    r"group=(?P<group>.*?)\((?P<size>\d{1,9})\)(?: op=(?P<op>\S+))? dtype=(?P<dtype>\S+) bytes=(?P<bytes>\d{1,18})"
    r"(?: fusion_id=(?P<fusion_id>-?\d{1,18}))? members=\[(?P<members>.*)\]"
)


@dataclass(frozen=True, slots=True)
class TextLine:
    """The parts of one line.

    value: what the node yields; op: what it calls, or what an input is; arguments: what stands in the parentheses, or
    behind `return`; remarks: what stands in each pair of braces.
    """

    number: int
    name: str
    phase: str
    value: str
    op: str
    arguments: str = ""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CollectiveText:
    """What the remark on a collective says. nbytes: of the payload; members: joined by ", "."""

    group: str
    size: int
    reduce_op: str
    dtype: str
    nbytes: int
    fusion_id: int | None
    members: str


def split_header(lines: Sequence[Numbered], error: ErrorAt) -> tuple[dict[str, str], Sequence[Numbered]]:
    """The values of the header by their names, and the lines behind it."""
    header: dict[str, str] = {}
    for position, (number, line) in enumerate(lines):
        if not line.startswith("#"):
            return header, lines[position:]
        name, colon, value = line.removeprefix("# ").partition(": ")
        if not colon or name in header:
            raise error(number, "this is not a header line `# name: value` with a name of its own")
        header[name] = value
    return header, ()


def split_lines(lines: Iterable[Numbered], error: ErrorAt) -> tuple[TextLine, ...]:
    """The lines of the nodes; the last one is that of `return`. Raises what `error` makes."""
    found: dict[str, TextLine] = {}
    last = (1, "")
    for number, line in lines:
        parts = _line(number, line, error)
        if parts.name in found:
            raise error(number, f"there are two nodes of the name {parts.name[:80]!r}")
        found[parts.name] = parts
        last = (number, line)
    if not last[1].startswith("return "):
        raise error(last[0], "the last line is not `return ...`: the file was cut off")
    return tuple(_call(parts, error) for parts in found.values())


def _line(number: int, line: str, error: ErrorAt) -> TextLine:
    """Name and value of a line; `op` is the rest of it."""
    if line.startswith("return "):
        return TextLine(number, RETURN, "update", "", RETURN, line.removeprefix("return "))
    if line[:3] not in _PHASES or line[3:5] != " %":
        raise error(number, f"{line[:40]!r} does not begin like a node: `fwd %name: `")
    text = line[5:]
    at = text.find(": ")
    while at >= 0:
        value = _VALUE.match(text, at + 2)
        if value:
            yielded = value.group().removesuffix(" = ")
            return TextLine(number, text[:at], _PHASES[line[:3]], yielded, text[value.end() :])
        at = text.find(": ", at + 1)
    raise error(number, "after the name there is no `: value = op(...)`")


def _call(line: TextLine, error: ErrorAt) -> TextLine:
    """The same line with its call taken apart."""
    if line.phase == "input" or line.name == RETURN:
        return line
    call, _, remarks = line.op.partition(")  {")
    closed = bool(remarks) or call.endswith(")")
    op, bracket, arguments = (call if remarks else call.removesuffix(")")).partition("(")
    if not bracket or not _OP.fullmatch(op) or not closed:
        raise error(line.number, "there is no whole call `op(...)` behind the equals sign")
    if remarks and not remarks.endswith("}"):
        raise error(line.number, "the last brace is not closed")
    each = tuple(remarks.removesuffix("}").split("}  {")) if remarks else ()
    return TextLine(line.number, line.name, line.phase, line.value, op, arguments, each)


class UnknownReference(ValueError):
    """A reference to a node that is not there."""


def argument_tokens(text: str, names: Mapping[str, object]) -> Iterator[str]:
    """The tokens of `%b, [c, %d]`: brackets, commas, whole references such as `%b`, and plain text between them.

    A comma that separates arguments is the token ", ". Raises UnknownReference, and ValueError for brackets that do
    not match.
    """
    depth, at = 0, 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        token = match.group() if match else text[at]
        if token == "%":
            token += _reference(text, at + 1, names)
        at += len(token)
        depth += (token == "[") - (token == "]")
        if depth < 0:
            raise ValueError("a bracket is closed that was not opened")
        yield token
    if depth:
        raise ValueError("a bracket is not closed")


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


def read_sends(remark: str) -> tuple[str, int, int] | None:
    """(name of the start, begin, end) of `sends bucket.0/in_place [0:64]`; None for another remark."""
    match = None if remark.startswith("sends the rest") else _SENDS.fullmatch(remark)
    return None if match is None else (match["start"], int(match["begin"]), int(match["end"]))


def read_collective(remark: str) -> CollectiveText | None:
    """What `group=dp(2) op=sum dtype=f32 bytes=8 members=[...]` says; None where it is not written like that."""
    match = _COLLECTIVE.fullmatch(remark)
    if match is None:
        return None
    identity = match["fusion_id"]
    return CollectiveText(
        match["group"],
        int(match["size"]),
        match["op"] or "",
        match["dtype"],
        int(match["bytes"]),
        None if identity is None else int(identity),
        match["members"],
    )
