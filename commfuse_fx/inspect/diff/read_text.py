"""Reads canonical text back into records."""

from __future__ import annotations

import re

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.inspect.diff.records import (
    RETURN,
    Argument,
    CollectiveRecord,
    GraphRecord,
    NodeRecord,
    UnknownReference,
    kind_of_op,
    parse_arguments,
    split_members,
)
from commfuse_fx.ir.naming import PHASE_TAG
from commfuse_fx.ir.text import SCHEMA
from commfuse_fx.support.json_fields import check_schema

_PHASES = {tag: phase for phase, tag in PHASE_TAG.items()}
_VALUE = re.compile(r"[\w\[\](),.* -]+ = ")
_OP = re.compile(r"[\w.]+")
_SENDS = re.compile(r"sends (?P<start>.+) (?P<stretch>\[\d+:\d+\])")
_COLLECTIVE = re.compile(
    r"group=(?P<group>.*?\(\d{1,9}\))(?: op=(?P<op>\S+))? dtype=(?P<dtype>\S+) bytes=(?P<bytes>\d{1,18})"
    r"(?: fusion_id=(?P<fusion_id>-?\d{1,18}))? members=\[(?P<members>.*)\]"
)


def read_text(text: str, label: str) -> GraphRecord:
    """Records of a canonical text. Raises ConfigValueError that names the line, what is wrong, and the fix."""
    return _Reader(text, label).read()


class _Reader:
    def __init__(self, text: str, label: str) -> None:
        self.label = label
        self.lines = text.removesuffix("\n").split("\n")
        self.number = 0
        self.names: dict[str, None] = {}

    def read(self) -> GraphRecord:
        header: dict[str, str] = {}
        for line in self.lines:
            if not line.startswith("#"):
                break
            self.number += 1
            name, colon, value = line.removeprefix("# ").partition(": ")
            if not colon or name in header:
                raise self.error("this is not a header line `# name: value` with a name of its own")
            header[name] = value
        if next(iter(header), "") != "schema":
            self.number = 1
            raise self.error("a canonical text begins with `# schema: <version>`")
        check_schema(header["schema"], self.label, SCHEMA)
        body = self.lines[self.number :]
        start = self.number
        split = []
        for offset, line in enumerate(body, start + 1):
            self.number = offset
            split.append(self.split(line))
        if not body or not body[-1].startswith("return "):
            raise self.error("the last line is not `return ...`: the file was cut off")
        nodes = []
        for offset, (line, parts) in enumerate(zip(body, split, strict=True), start + 1):
            self.number = offset
            nodes.append(self.node(line, parts))
        return GraphRecord(self.label, header, tuple(nodes))

    def error(self, problem: str) -> ConfigValueError:
        return ConfigValueError(f"{self.label}, line {self.number}: {problem}; write the dump again")

    def split(self, line: str) -> tuple[str, str, str]:
        """(name, value, call) of a line; reserves the name."""
        if line.startswith("return "):
            name, parts = RETURN, (RETURN, "", line.removeprefix("return "))
        else:
            if line[:3] not in _PHASES or line[3:5] != " %":
                raise self.error(f"{line[:40]!r} does not begin like a node: `fwd %name: `")
            parts = self.definition(line[5:])
            name = parts[0]
        if name in self.names:
            raise self.error(f"there are two nodes of the name {name[:80]!r}")
        self.names[name] = None
        return parts

    def definition(self, text: str) -> tuple[str, str, str]:
        at = text.find(": ")
        while at >= 0:
            value = _VALUE.match(text, at + 2)
            if value:
                return text[:at], value.group().removesuffix(" = "), text[value.end() :]
            at = text.find(": ", at + 1)
        raise self.error("after the name there is no `: value = op(...)`")

    def node(self, line: str, parts: tuple[str, str, str]) -> NodeRecord:
        name, value, call = parts
        if name == RETURN:
            return NodeRecord(RETURN, RETURN, RETURN, "", self.arguments(call))
        phase = _PHASES[line[:3]]
        if phase == "input":
            op = "constant" if call == "constant" else "input"
            return NodeRecord(name, phase, op, value, (Argument(call),))
        call, _, remarks = call.partition(")  {")
        call = call if remarks else call.removesuffix(")")
        op, bracket, inner = call.partition("(")
        if not bracket or not _OP.fullmatch(op) or (not remarks and not line.endswith(")")):
            raise self.error("there is no whole call `op(...)` behind the equals sign")
        if remarks and not remarks.endswith("}"):
            raise self.error("the last brace is not closed")
        extras: list[Argument] = []
        collective = None
        for remark in remarks.removesuffix("}").split("}  {") if remarks else ():
            sends = None if remark.startswith("sends the rest") else _SENDS.fullmatch(remark)
            if remark.startswith("group="):
                collective = self.collective(remark, op)
            elif sends:
                extras.append(self.sends(sends["start"], sends["stretch"]))
            else:
                extras.extend(self.arguments(remark, split=False))
        return NodeRecord(name, phase, op, value, self.arguments(inner), collective, tuple(extras))

    def arguments(self, text: str, split: bool = True) -> tuple[Argument, ...]:
        try:
            found = parse_arguments(text, self.names)
        except UnknownReference as unknown:
            raise self.error(f"it refers to %{str(unknown)[:80]}, and no node has this name") from None
        except ValueError as problem:
            raise self.error(str(problem)) from None
        if split or len(found) < 2:
            return found
        operands = tuple(name for each in found for name in each.operands)
        return (Argument(", ".join(each.pattern for each in found), operands),)

    def sends(self, start: str, stretch: str) -> Argument:
        if start not in self.names:
            raise self.error(f"it sends {start[:80]}, and no node has this name")
        return Argument(f"sends % {stretch}", (start,))

    def collective(self, text: str, op: str) -> CollectiveRecord:
        match = _COLLECTIVE.fullmatch(text)
        if match is None:
            raise self.error("a collective is described as `group=dp(2) op=sum dtype=f32 bytes=8 members=[...]`")
        identity = match["fusion_id"]
        return CollectiveRecord(
            kind_of_op(op),
            match["group"],
            match["op"] or "",
            match["dtype"],
            int(match["bytes"]),
            None if identity is None else int(identity),
            split_members(match["members"]),
        )
