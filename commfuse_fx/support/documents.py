"""Documents of the cost model on disk: JSON text with a schema number and a kind, read strictly.

A document is an object `{"schema": 1, "kind": "cluster", ...}`. Reading never guesses: an unknown, missing or doubled
key, a wrong type and a newer schema are errors that name the document, the field and the fix.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeGuard, TypeVar

from commfuse_fx.errors import ConfigKeyError, ConfigTypeError, ConfigValueError
from commfuse_fx.support.checks import is_int, show

SCHEMA = 1
"""The schema that this version writes, and the newest that it reads."""

Reader = Callable[[Mapping[str, Any], str], Any]
"""Makes an object of a document's keys (without schema and kind); the str says where the document comes from."""

_READERS: dict[str, Reader] = {}

_Kept = TypeVar("_Kept", bound="Document")
_Made = TypeVar("_Made")


class Document:
    """What can be kept as a document: a class made with `kind=`, such as "cluster", which `load_document` then reads.

    A subclass says what its keys are: `_body` gives them, `_from_body` makes an object of them.
    """

    kind: ClassVar[str]

    def __init_subclass__(cls, *, kind: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.kind = kind
        _READERS[kind] = cls._from_body

    def _body(self) -> Mapping[str, Any]:
        raise NotImplementedError

    @classmethod
    def _from_body(cls: type[_Kept], body: Mapping[str, Any], where: str) -> _Kept:
        raise NotImplementedError

    def to_json(self) -> str:
        """The text of a JSON document of this kind; `from_json` reads it back."""
        return document_text(self.kind, self._body())

    @classmethod
    def from_json(cls: type[_Kept], text: str, where: str = "the text") -> _Kept:
        """What `to_json` wrote; `where` says in errors where the text comes from.

        Raises ConfigTypeError, ConfigKeyError or ConfigValueError, naming `where`, the field and the fix.
        """
        if not isinstance(text, str):
            raise ConfigTypeError(f"{where} is {show(text)}; give a str, or the path of a file to load()")
        kind, body = parse_document(text, where)
        if kind != cls.kind:
            raise ConfigValueError(f'{where}: kind is {show(kind)}; give a document of kind "{cls.kind}"')
        return cls._from_body(body, where)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file. Raises ConfigTypeError for what is no path, OSError when writing fails."""
        write_document(_checked_path(path), self.to_json())

    @classmethod
    def load(cls: type[_Kept], path: str | os.PathLike[str]) -> _Kept:
        """Read a file that `save` wrote. Raises like `from_json`, and ConfigValueError when it cannot be read."""
        where = _checked_path(path)
        return cls.from_json(read_text(where), where)


def is_path(value: object) -> TypeGuard[str | os.PathLike[str]]:
    """Whether an option names a file: a path object, or a str that ends with .json or has a separator."""
    if isinstance(value, str):
        return value.endswith(".json") or any(mark in value for mark in ("/", os.sep, os.altsep) if mark)
    return isinstance(value, os.PathLike)


def load_document(path: str | os.PathLike[str]) -> Any:
    """What the file describes, made by the reader of its kind.

    Raises ConfigTypeError, ConfigKeyError or ConfigValueError, which name the file, the field and the fix.
    """
    where = _checked_path(path)
    kind, body = parse_document(read_text(where), where)
    if kind not in _READERS:
        known = ", ".join(f'"{name}"' for name in _READERS)
        raise ConfigValueError(f"{where}: kind is {show(kind)}, which cannot be read here; give one of {known}")
    return _READERS[kind](body, where)


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file. Raises ConfigValueError when it is missing, no regular file, or cannot be read."""
    try:
        if Path(path).exists() and not Path(path).is_file():  # a pipe might never end
            raise OSError("it is no regular file")
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigValueError(f"{os.fspath(path)} does not exist; give the path of a JSON file") from None
    except (OSError, ValueError) as error:
        raise ConfigValueError(f"{os.fspath(path)} cannot be read ({error}); give the path of a JSON file") from None


def write_document(path: str | os.PathLike[str], text: str) -> None:
    """Write the text of a document. Raises OSError when the file cannot be written."""
    Path(path).write_text(text, encoding="utf-8")


def document_text(kind: str, body: Mapping[str, Any]) -> str:
    """The JSON text of a document, with a line per field and lists of plain values on one line."""
    return _layout({"schema": SCHEMA, "kind": kind, **body}, "") + "\n"


def parse_document(text: str, where: str) -> tuple[str, dict[str, Any]]:
    """(kind, the other keys) of a document's text; `where` says in errors where the text comes from.

    Raises ConfigTypeError when it is not an object, ConfigKeyError for a missing or doubled key, ConfigValueError
    when it is not JSON or has a schema that this version does not know.
    """
    try:
        found = json.loads(text, object_pairs_hook=_unique_keys)
    except ConfigKeyError as error:
        raise ConfigKeyError(f"{where}: {error}") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ConfigValueError(f"{where} is not JSON: {error.msg} at {place}; correct it there") from None
    except (ValueError, RecursionError) as error:
        raise ConfigValueError(f"{where} is not JSON: {error}; give finite numbers and plain nesting") from None
    body = check_object(found, where)
    for key in ("schema", "kind"):
        if key not in body:
            raise ConfigKeyError(f'{where}: key "{key}" is missing; give "schema": {SCHEMA} and a "kind"')
    schema, kind = body.pop("schema"), body.pop("kind")
    if not is_int(schema):
        raise ConfigTypeError(f"{where}: schema is {show(schema)}; give {SCHEMA}")
    if schema > SCHEMA:
        raise ConfigValueError(
            f"{where}: schema is {schema}, but this version reads up to {SCHEMA}; install a newer commfuse-fx or write "
            "the file again"
        )
    if schema < 1:
        raise ConfigValueError(f"{where}: schema is {schema}; give {SCHEMA}")
    if not isinstance(kind, str):
        raise ConfigTypeError(f'{where}: kind is {show(kind)}; give a str such as "cluster"')
    return kind, body


def made_of(made: Callable[..., _Made], fields: Mapping[str, Any], where: str) -> _Made:
    """An object of a document's fields, whose errors are told with `where` in front."""
    try:
        return made(**fields)
    except (ConfigTypeError, ConfigValueError) as error:
        raise type(error)(f"{where}: {error}") from None


def check_object(value: object, where: str) -> dict[str, Any]:
    """A copy of a JSON object. Raises ConfigTypeError for anything else."""
    if not isinstance(value, dict):
        raise ConfigTypeError(f"{where} is {show(value)}; give a JSON object")
    return dict(value)


def check_keys(body: Mapping[str, Any], where: str, required: Collection[str], optional: Collection[str] = ()) -> None:
    """Raises ConfigKeyError for a key that is missing or unknown."""
    allowed = ", ".join((*required, *optional))
    for key in required:
        if key not in body:
            raise ConfigKeyError(f'{where}: key "{key}" is missing; give {allowed}')
    for key in body:
        if key not in required and key not in optional:
            raise ConfigKeyError(f"{where}: key {show(key)} is unknown; use {allowed}")


def check_number(value: object, where: str, *, positive: bool = False) -> float:
    """`value` as a finite float >= 0 (> 0 with `positive`). Raises ConfigTypeError or ConfigValueError."""
    allowed = "a finite number > 0" if positive else "a finite number >= 0"
    if not isinstance(value, float) and not is_int(value):
        raise ConfigTypeError(f"{where} is {show(value)}; give {allowed}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        raise ConfigValueError(f"{where} is {show(value)}; give {allowed}")
    return number


def check_text(value: object, where: str, *, empty: bool = False) -> str:
    """`value` if it is a str, non-empty unless `empty`. Raises ConfigTypeError or ConfigValueError."""
    if not isinstance(value, str):
        raise ConfigTypeError(f"{where} is {show(value)}; give a str")
    if not value and not empty:
        raise ConfigValueError(f"{where} is empty; give a name")
    if not _is_unicode(value):
        raise ConfigValueError(f"{where} is {show(value)}, which has half of a surrogate pair; give whole characters")
    return value


def _is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8. JSON may name half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked_path(path: object) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigTypeError(f"path is {show(path)}; give the path of a JSON file")
    return os.fspath(path)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigKeyError(f"key {show(key)} stands twice in one object; keep one of them")
        found[key] = value
    return found


def _layout(value: Any, indent: str) -> str:
    inner = indent + "  "
    if isinstance(value, Mapping) and value:
        lines = [f"{inner}{json.dumps(key)}: {_layout(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, (list, tuple)) and any(isinstance(item, (list, tuple, Mapping)) for item in value):
        return "[\n" + ",\n".join(f"{inner}{_layout(item, inner)}" for item in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
