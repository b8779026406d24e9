"""Reads canonical text back into records."""

from __future__ import annotations

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.inspect.diff.records import (
    Argument,
    CollectiveRecord,
    GraphRecord,
    NodeRecord,
    kind_of_op,
    parse_arguments,
    split_members,
)
from commfuse_fx.ir.text.text_lines import (
    RETURN,
    TextLine,
    UnknownReference,
    read_collective,
    read_sends,
    split_header,
    split_lines,
)
from commfuse_fx.ir.text.write_text import SCHEMA
from commfuse_fx.support.strict_json import check_schema


def read_text(text: str, label: str) -> GraphRecord:
    """Records of a canonical text. Raises ConfigValueError that names the line, what is wrong, and the fix."""
    return _Reader(text, label).read()


class _Reader:
    def __init__(self, text: str, label: str) -> None:
        self.label = label
        self.lines = list(enumerate(text.removesuffix("\n").split("\n"), 1))
        self.number = 0
        self.names: dict[str, None] = {}

    def read(self) -> GraphRecord:
        header, body = split_header(self.lines, self.error_at)
        if next(iter(header), "") != "schema":
            raise self.error_at(1, "a canonical text begins with `# schema: <version>`")
        check_schema(header["schema"], self.label, SCHEMA)
        lines = split_lines(body, self.error_at)
        self.names = dict.fromkeys(line.name for line in lines)
        return GraphRecord(self.label, header, tuple(self.node(line) for line in lines))

    def error_at(self, number: int, problem: str) -> ConfigValueError:
        return ConfigValueError(f"{self.label}, line {number}: {problem}; write the dump again")

    def error(self, problem: str) -> ConfigValueError:
        return self.error_at(self.number, problem)

    def node(self, line: TextLine) -> NodeRecord:
        self.number = line.number
        if line.name == RETURN:
            return NodeRecord(RETURN, RETURN, RETURN, "", self.arguments(line.arguments))
        if line.phase == "input":
            op = "constant" if line.op == "constant" else "input"
            return NodeRecord(line.name, line.phase, op, line.value, (Argument(line.op),))
        extras: list[Argument] = []
        collective = None
        for remark in line.remarks:
            sends = read_sends(remark)
            if remark.startswith("group="):
                collective = self.collective(remark, line.op)
            elif sends:
                start, begin, end = sends
                extras.append(self.sends(start, f"[{begin}:{end}]"))
            else:
                extras.extend(self.arguments(remark, split=False))
        arguments = self.arguments(line.arguments)
        return NodeRecord(line.name, line.phase, line.op, line.value, arguments, collective, tuple(extras))

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
        said = read_collective(text)
        if said is None:
            raise self.error("a collective is described as `group=dp(2) op=sum dtype=f32 bytes=8 members=[...]`")
        return CollectiveRecord(
            kind_of_op(op),
            f"{said.group}({said.size})",
            said.reduce_op,
            said.dtype,
            said.nbytes,
            said.fusion_id,
            split_members(said.members),
        )
