"""Typed access to the JSON of a dump, and its layout in a file. Errors name the document, the place and what to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.support.strict_json import JsonRules

DUMP = JsonRules("write the dump again")
"""How files of a dump are read."""

LARGEST = 2**63
"""Sizes, offsets and counts are below it."""

_NOUNS = {str: "text", int: "integer", list: "list", dict: "object", bool: "boolean"}


def dump_text(content: Mapping[str, Any]) -> str:
    """JSON in ASCII, with one line for each entry of the lists and objects at the top."""
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {_entry(value)}" for key, value in content.items()) + "\n}\n"


def _entry(value: Any) -> str:
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(f"  {json.dumps(key)}: {_line(item)}" for key, item in value.items()) + "\n }"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"  {_line(item)}" for item in value) + "\n ]"
    return _line(value)


def _line(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


class Fields:
    """Typed access to what a document holds. `label` says in errors which document it is."""

    def __init__(self, label: str) -> None:
        self.label = label

    def error(self, place: str, problem: str) -> ConfigValueError:
        return ConfigValueError(f"{self.label}, {place}: {problem}; {DUMP.fix}")

    def get(self, record: Mapping[str, Any], key: str, kind: type[Any], place: str, default: Any = ...) -> Any:
        """The value of a key, which has to be of this type; integers have 64 bits. Raises ConfigValueError."""
        value = record.get(key, default)
        if value is default and default is not ...:
            return default
        if value is ...:
            raise self.error(place, f'"{key}" is missing')
        return self.typed(value, kind, f"{place}.{key}")

    def typed(self, value: Any, kind: type[Any], place: str) -> Any:
        """The value, if it is of this type."""
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(place, f"this is no {_NOUNS[kind]}")
        if kind is int and not -LARGEST < value < LARGEST:
            raise self.error(place, "this number is too large")
        return value

    def items(self, record: Mapping[str, Any], key: str, kind: type[Any], place: str, default: Any = ...) -> list[Any]:
        """The list of a key, whose items have to be of this type."""
        found = self.get(record, key, list, place, default)
        return [self.typed(each, kind, f"{place}.{key}[{i}]") for i, each in enumerate(found)]

    def choice(self, value: str, choices: tuple[str, ...], place: str) -> str:
        """The value, if it is one of these."""
        if value not in choices:
            raise self.error(place, f"{value[:40]!r} is none of {', '.join(choices)}")
        return value
