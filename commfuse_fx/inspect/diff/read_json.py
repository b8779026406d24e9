"""Reads the JSON of a graph back into records, in the same normal form as the text."""

from __future__ import annotations

from typing import Any

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.inspect.diff.records import (
    Argument,
    CollectiveRecord,
    GraphRecord,
    NodeRecord,
    parse_arguments,
    split_members,
)
from commfuse_fx.ir.json.write import SCHEMA
from commfuse_fx.ir.meta import PHASES, contiguous_stride
from commfuse_fx.ir.text_lines import RETURN
from commfuse_fx.support.json_fields import DUMP, LARGEST, Fields
from commfuse_fx.support.strict_json import parse_object

_TEXTS = ("dtype", "device", "layout", "memory_format", "number", "text")
"""Values of arguments that are an object with a text."""


def read_json(text: str, label: str) -> GraphRecord:
    """Records of a graph as JSON. Raises ConfigValueError that names the place, what is wrong, and the fix."""
    try:
        return _Reader(parse_object(text, label, SCHEMA, DUMP), label).read()
    except RecursionError:
        raise ConfigValueError(f"{label}: a value is nested too deeply; write the dump again") from None


class _Reader(Fields):
    """Reads what can be compared. Unlike `from_json` it takes ops that this process does not know."""

    def __init__(self, data: dict[str, Any], label: str) -> None:
        super().__init__(label)
        self.data = data
        self.names: dict[str, None] = {}

    def read(self) -> GraphRecord:
        header = self.get(self.data, "header", dict, "the file")
        for key, value in header.items():
            if not isinstance(value, str):
                raise self.error(f"header.{key[:80]}", "this is no text")
        records = self.get(self.data, "nodes", list, "the file")
        for i, record in enumerate(records):
            if not isinstance(record, dict):
                raise self.error(f"nodes[{i}]", "this is no object")
            if record.get("op") == "output":
                name = RETURN
            else:
                name = self.get(record, "name", str, f"nodes[{i}]")
            if name in self.names:
                raise self.error(f"nodes[{i}]", f"there are two nodes of the name {name[:80]!r}")
            self.names[name] = None
        if next(reversed(self.names), "") != RETURN:
            raise self.error("nodes", 'the last one is not the "output"')
        return GraphRecord(self.label, header, tuple(self.node(r, f"nodes[{i}]") for i, r in enumerate(records)))

    def node(self, record: dict[str, Any], place: str) -> NodeRecord:
        op = self.get(record, "op", str, place)
        if op == "output":
            return NodeRecord(
                RETURN, RETURN, RETURN, "", self.arguments([self.value(record.get("args"), place)], place)
            )
        name, phase = record["name"], self.get(record, "phase", str, place)
        if phase not in PHASES:
            raise self.error(f"{place}.phase", f"{phase[:40]!r} is none of {', '.join(PHASES)}")
        spec = record.get("value")
        value = self.spec(spec, f"{place}.value")
        if op == "constant":
            return NodeRecord(name, "input", op, value, (Argument("constant"),))
        if op == "input":
            source = self.get(record, "source", str, place)
            value = "number" if source == "hyper" else value
            return NodeRecord(name, phase, op, value, (Argument(self.source(record, source, place)),))
        texts = [self.value(each, f"{place}.args") for each in self.get(record, "args", list, place)]
        keywords = self.get(record, "kwargs", dict, place, {})
        texts += [f"{key}={self.value(each, f'{place}.kwargs')}" for key, each in keywords.items()]
        collective = self.get(record, "collective", dict, place, None)
        return NodeRecord(
            name,
            phase,
            op,
            value,
            self.arguments(texts, place),
            None if collective is None else self.collective(collective, f"{place}.collective"),
            self.extras(record, place),
        )

    def arguments(self, texts: list[str], place: str) -> tuple[Argument, ...]:
        try:
            return parse_arguments(", ".join(texts), self.names)
        except ValueError as error:
            raise self.error(f"{place}.args", f"these cannot be told apart ({str(error)[:80]})") from None

    def source(self, record: dict[str, Any], source: str, place: str) -> str:
        if source == "hyper":
            return "hyper-parameter of the optimizer"
        if source == "state" and isinstance(record.get("value"), list):
            return f"state of {len(record['value'])} tensor(s)"
        if source != "flat":
            return source
        parts = []
        for i, each in enumerate(self.get(record, "members", list, place)):
            where = f"{place}.members[{i}]"
            if not isinstance(each, dict):
                raise self.error(where, "this is no object")
            parts.append(f"{self.get(each, 'name', str, where)}@{self.get(each, 'offset', int, where)}")
        return f"flat [{', '.join(parts)}]"

    def spec(self, spec: Any, place: str) -> str:
        if spec is None:
            return "-"
        if isinstance(spec, list):
            texts = [self.spec(each, f"{place}[{i}]") for i, each in enumerate(spec)]
            return f"({', '.join(texts)})" if len(texts) <= 4 else f"({', '.join(texts[:3])}, ... {len(texts)})"
        if not isinstance(spec, dict):
            raise self.error(place, "this is neither a tensor nor a list of them")
        shape, stride = self.sizes(spec, "shape", place), self.sizes(spec, "stride", place)
        text = f"{self.get(spec, 'dtype', str, place)}[{','.join(map(str, shape))}]"
        plain = len(stride) == len(shape) and (
            0 in shape
            or all(
                size == 1 or have == want
                for size, have, want in zip(shape, stride, contiguous_stride(shape), strict=True)
            )
        )
        return text if plain else f"{text}({','.join(map(str, stride))})"

    def sizes(self, spec: dict[str, Any], key: str, place: str) -> list[int]:
        sizes: list[int] = self.get(spec, key, list, place)
        if not all(type(size) is int and -LARGEST < size < LARGEST for size in sizes):
            raise self.error(f"{place}.{key}", "these are not all integers of 64 bits")
        return sizes

    def reference(self, name: Any, place: str) -> str:
        if not isinstance(name, str) or name not in self.names or name == RETURN:
            raise self.error(place, f"it refers to {str(name)[:80]!r}, and no node has this name")
        return f"%{name}"

    def value(self, value: Any, place: str) -> str:
        if isinstance(value, list):
            return f"[{', '.join(self.value(each, place) for each in value)}]"
        if not isinstance(value, dict):
            return value if isinstance(value, str) else str(value)
        if "node" in value:
            return self.reference(value["node"], place)
        if isinstance(value.get("tuple"), list):
            return self.value(value["tuple"], place)
        if "complex" in value:
            return self.complex_number(value["complex"], place)
        text = next((value[key] for key in _TEXTS if key in value), None)
        if not isinstance(text, str):
            raise self.error(place, f'an object here has "node", "dtype" or "text", or one of {", ".join(_TEXTS)}')
        return text

    def complex_number(self, parts: Any, place: str) -> str:
        if not (isinstance(parts, list) and len(parts) == 2):
            raise self.error(place, "a complex number is two numbers")
        try:
            return str(complex(*(float(self.value(each, place)) for each in parts)))
        except (ValueError, OverflowError):
            raise self.error(place, "a complex number is two numbers") from None

    def extras(self, record: dict[str, Any], place: str) -> tuple[Argument, ...]:
        found = [Argument("kept between steps")] if record.get("kept") else []
        if record.get("next_step") is not None:
            anchor = self.get(record, "next_step", dict, place)
            name = self.reference(anchor.get("node"), f"{place}.next_step")[1:]
            found.append(Argument("in the next step, before %", (name,)))
        rest = self.get(record, "rest", list, place, [])
        if not all(isinstance(each, list) and len(each) == 2 and all(type(n) is int for n in each) for each in rest):
            raise self.error(f"{place}.rest", "this is no list of [begin, end]")
        if rest:
            found.append(Argument(f"sends the rest: {' '.join(f'[{begin}:{end}]' for begin, end in rest)}"))
        for i, each in enumerate(self.get(record, "sends", list, place, [])):
            where = f"{place}.sends[{i}]"
            if not isinstance(each, dict):
                raise self.error(where, "this is no object")
            name = self.reference(each.get("collective"), where)[1:]
            begin, end = self.get(each, "begin", int, where), self.get(each, "end", int, where)
            found.append(Argument(f"sends % [{begin}:{end}]", (name,)))
        return tuple(found)

    def collective(self, record: dict[str, Any], place: str) -> CollectiveRecord:
        members = self.get(record, "members", list, place)
        if not all(isinstance(each, str) for each in members):
            raise self.error(f"{place}.members", "these are not all names")
        reduce_op = record.get("reduce_op")
        if not (reduce_op is None or isinstance(reduce_op, str)):
            raise self.error(f"{place}.reduce_op", "this is no text")
        identity = record.get("fusion_id")
        return CollectiveRecord(
            self.get(record, "kind", str, place),
            f"{self.get(record, 'group', str, place)}({self.get(record, 'group_size', int, place)})",
            reduce_op or "",
            self.get(record, "dtype", str, place),
            self.get(record, "bytes", int, place),
            None if identity is None else self.get(record, "fusion_id", int, place),
            split_members(", ".join(members)),
        )
