"""Documents of the compiler as JSON: read without trust in them, and written with a line for each entry.

Every error names the document, the place in it and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from commfuse_fx.errors import ConfigValueError

MOST_BYTES = 1 << 27
"""Larger documents are refused. A node takes some 600 bytes: this is a graph of 200,000 nodes, and parsing takes about
ten times the memory of the text."""

LARGEST = 2**63
"""Sizes, offsets and counts are below it."""

_NOUNS = {str: "text", int: "integer", list: "list", dict: "object", bool: "boolean"}


def check_schema(found: str, label: str, newest: int) -> None:
    """Raises ConfigValueError unless this version can be read."""
    if not (found.isascii() and found.isdecimal() and len(found) < 10 and int(found) > 0):
        raise ConfigValueError(f"{label}: schema is {found[:40]!r}, not a version number; write the dump again")
    if int(found) > newest:
        raise ConfigValueError(
            f"{label}: schema is {found}, and this version of commfuse-fx reads schemas up to {newest}; "
            "update commfuse-fx, or write the dump with this version"
        )


def load_object(text: str, label: str, newest: int) -> dict[str, Any]:
    """A JSON object with a schema of at most `newest`. Raises ConfigValueError."""
    if len(text) > MOST_BYTES:
        raise ConfigValueError(f"{label} has {len(text)} characters, more than {MOST_BYTES}: this is no graph")
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ConfigValueError(
            f"{label}, line {error.lineno}, column {error.colno}: not JSON ({error.msg}); write the dump again"
        ) from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigValueError(f"{label}: this JSON cannot be read ({reason}); write the dump again") from None
    if "\\ud" in text.lower() and _has_half_characters(found):
        raise ConfigValueError(f"{label}: a text has half of a character (a lone surrogate); write the dump again")
    if not isinstance(found, dict):
        raise ConfigValueError(f"{label}: the JSON is no object; give the graph.json that Lowered.dump wrote")
    schema = found.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool):
        raise ConfigValueError(f'{label}: there is no "schema"; give the graph.json that Lowered.dump wrote')
    if not -LARGEST < schema < LARGEST:
        raise ConfigValueError(f"{label}: schema is no version number; write the dump again")
    check_schema(str(schema), label, newest)
    return found


def _has_half_characters(found: Any) -> bool:
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def document_text(content: Mapping[str, Any]) -> str:
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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for i, key in enumerate(names) if key in names[:i])
        raise ValueError(f"the key {twice[:80]!r} stands twice in one object")
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


class Fields:
    """Typed access to what a document holds. `label` says in errors which document it is."""

    def __init__(self, label: str) -> None:
        self.label = label

    def error(self, place: str, problem: str) -> ConfigValueError:
        return ConfigValueError(f"{self.label}, {place}: {problem}; write the dump again")

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
