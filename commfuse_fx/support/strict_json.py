"""The one place that parses JSON from files and from users: strictly, and without trust in the text.

Errors name the document, the place in it and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from commfuse_fx.errors import CommFuseError, ConfigTypeError, ConfigValueError
from commfuse_fx.support.checks import is_int, is_unicode, show

MOST_CHARACTERS = 1 << 27
"""Larger documents are refused. A node takes some 600 bytes: this is a graph of 200,000 nodes, and parsing takes about
ten times the memory of the text."""


@dataclass(frozen=True)
class JsonRules:
    """What differs between kinds of documents.

    fix: what errors say to do about a damaged text, such as "write the dump again".
    type_error: what is raised for a value of another type.
    key_error: what is raised for a key that is missing or stands twice.
    constants: whether NaN and Infinity are numbers; only for readers that check every number, and then name its place.
    """

    fix: str
    type_error: type[CommFuseError] = ConfigValueError
    key_error: type[CommFuseError] = ConfigValueError
    constants: bool = False


TYPED = JsonRules("write JSON")
"""For values that a user types, such as options on the command line."""


def parse_json(text: str, label: str, rules: JsonRules) -> Any:
    """The value that a text stands for; `label` says in errors which document it is.

    Raises `rules.key_error` for a key that stands twice in one object. Raises ConfigValueError for a text that is no
    JSON, is too large or too deep, or names half of a character.
    """
    size = len(text)
    if size > MOST_CHARACTERS:
        raise ConfigValueError(f"{label} has {size} characters, and at most {MOST_CHARACTERS} are read; {rules.fix}")
    try:
        found = json.loads(
            text, object_pairs_hook=_unique, parse_constant=None if rules.constants else _refuse_constant
        )
        if "\\ud" in text.lower() or not text.isascii():
            for place, half in _half_characters(found, ""):
                raise ConfigValueError(
                    f"{label}: {place[:200] or 'the text'} is {show(half)}, which has half of a surrogate pair, "
                    f"that is half of a character; {rules.fix}"
                )
        return found
    except _DoubledKey as doubled:
        raise rules.key_error(f"{label}: the key {show(doubled.key)} stands twice in one object; {rules.fix}") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ConfigValueError(f"{label}, {place}: not JSON ({error.msg}); {rules.fix}") from None
    except RecursionError:
        raise ConfigValueError(f"{label} is nested too deeply; {rules.fix}") from None
    except ConfigValueError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise ConfigValueError(f"{label}: this JSON cannot be read ({error}); {rules.fix}") from None


def parse_object(text: str, label: str, newest: int, rules: JsonRules) -> dict[str, Any]:
    """The JSON object that a text stands for, with a "schema" of 1 to `newest`.

    Raises like `parse_json` and `check_document`.
    """
    return check_document(parse_json(text, label, rules), label, newest, rules)


def check_document(value: object, label: str, newest: int, rules: JsonRules) -> dict[str, Any]:
    """A copy of a JSON object with a "schema" of 1 to `newest`.

    Raises `rules.type_error` for what is no object, or has a schema that is no integer; `rules.key_error` where the
    schema is missing; ConfigValueError where this version cannot read it.
    """
    found = check_object(value, label, rules.type_error)
    if "schema" not in found:
        raise rules.key_error(f'{label}: key "schema" is missing; give "schema": {newest}')
    schema = found["schema"]
    if not is_int(schema):
        raise rules.type_error(f"{label}: schema is {show(schema)}; give {newest}")
    check_schema(schema, label, newest)
    return found


def check_object(value: object, where: str, type_error: type[CommFuseError] = ConfigTypeError) -> dict[str, Any]:
    """A copy of a JSON object. Raises `type_error` for anything else."""
    if not isinstance(value, dict):
        raise type_error(f"{where} is {show(value)}; give a JSON object")
    return dict(value)


def check_schema(found: int | str, label: str, newest: int) -> None:
    """Raises ConfigValueError unless this version can read a document of this schema: a number, or its digits."""
    digits = str(found)
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 10 and int(digits) > 0):
        raise ConfigValueError(f"{label}: schema is {show(found)}, not a version number; give {newest}")
    if int(digits) > newest:
        raise ConfigValueError(
            f"{label}: schema is {digits}, and this version of commfuse-fx reads schemas up to {newest}; "
            "update commfuse-fx, or write the file again with this version"
        )


class _DoubledKey(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [key for key, _ in pairs]
        raise _DoubledKey(next(key for i, key in enumerate(names) if key in names[:i]))
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _half_characters(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """(place, text) of the texts that cannot be written as UTF-8: JSON may name half of a surrogate pair."""
    if isinstance(value, str) and not is_unicode(value):
        yield place, value
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _half_characters(item, f"{place}[{i}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not is_unicode(key):
                yield f"a key of {place or 'the object'}", key
            yield from _half_characters(item, f"{place}.{key}" if place else key)
