"""Documents of the cost model on disk: JSON text with a schema number and a kind, read strictly.

A document is an object `{"schema": 1, "kind": "cluster", ...}`. Reading never guesses: an unknown, missing or doubled
key, a wrong type and a newer schema are errors that name the document, the field and the fix.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeGuard, TypeVar

from commfuse_fx.errors import ConfigKeyError, ConfigTypeError, ConfigValueError
from commfuse_fx.support.checks import show
from commfuse_fx.support.read_file import read_file
from commfuse_fx.support.strict_json import JsonRules, check_document, parse_json

SCHEMA = 1
"""The schema that this version writes, and the newest that it reads."""

Reader = Callable[[Mapping[str, Any], str], Any]
"""Makes an object of a document's keys (without schema and kind); the str says where the document comes from."""

_RULES = JsonRules("correct it there", ConfigTypeError, ConfigKeyError, constants=True)
_PATH = "give the path of a JSON file"

_READERS: dict[str, Reader] = {}

_Kept = TypeVar("_Kept", bound="Document")
_Made = TypeVar("_Made")


class Document:
    """What can be kept as a document: a class made with `kind=`, such as "cluster", which `load_document` then reads.

    A subclass says what its keys are: `_body` gives them, `_from_body` makes an object of them. `fix=` is what errors
    say to do about a file that cannot be read, for documents that nobody writes by hand.
    """

    kind: ClassVar[str]
    _fix: ClassVar[str]

    def __init_subclass__(cls, *, kind: str, fix: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.kind = kind
        cls._fix = fix
        _READERS[kind] = cls._from_body

    def _body(self) -> Mapping[str, Any]:
        raise NotImplementedError

    @classmethod
    def _from_body(cls: type[_Kept], body: Mapping[str, Any], where: str) -> _Kept:
        raise NotImplementedError

    def to_json(self) -> str:
        """The text of a JSON document of this kind; `from_json` reads it back."""
        return _layout({"schema": SCHEMA, "kind": self.kind, **self._body()}, "") + "\n"

    @classmethod
    def from_json(cls: type[_Kept], text: str, where: str = "the text") -> _Kept:
        """What `to_json` wrote; `where` says in errors where the text comes from.

        Raises ConfigTypeError, ConfigKeyError or ConfigValueError, naming `where`, the field and the fix.
        """
        if not isinstance(text, str):
            raise ConfigTypeError(f"{where} is {show(text)}; give a str, or the path of a file to load()")
        return document_of_data(cls, parse_json(text, where, replace(_RULES, fix=cls._fix or _RULES.fix)), where)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file. Raises ConfigTypeError for what is no path, OSError when writing fails."""
        Path(_checked_path(path)).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls: type[_Kept], path: str | os.PathLike[str], give: str = "") -> _Kept:
        """Read a file that `save` wrote. Raises like `from_json`, and ConfigValueError when it cannot be read.

        give: what the latter says to do, where the caller knows more than that this is a path.
        """
        where = _checked_path(path)
        return cls.from_json(_content(where, give or cls._fix or _PATH), where)


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
    kind, body = _taken_apart(parse_json(_content(where), where, _RULES), where)
    if kind not in _READERS:
        known = ", ".join(f'"{name}"' for name in _READERS)
        raise ConfigValueError(f"{where}: kind is {show(kind)}, which cannot be read here; give one of {known}")
    return _READERS[kind](body, where)


def document_data(document: Document) -> dict[str, Any]:
    """What `to_json` writes, as plain data: for a document that is a part of another one."""
    found: dict[str, Any] = json.loads(document.to_json())
    return found


def document_of_data(made: type[_Kept], data: object, where: str) -> _Kept:
    """The inverse of `document_data`. Raises like `from_json`."""
    kind, body = _taken_apart(data, where)
    if kind != made.kind:
        raise ConfigValueError(f'{where}: kind is {show(kind)}; give a document of kind "{made.kind}"')
    return made._from_body(body, where)


def _taken_apart(data: object, where: str) -> tuple[str, dict[str, Any]]:
    """(kind, the other keys) of a document. Raises ConfigTypeError, ConfigKeyError or ConfigValueError."""
    body = check_document(data, where, SCHEMA, _RULES)
    if "kind" not in body:
        raise ConfigKeyError(f'{where}: key "kind" is missing; give a kind such as "cluster"')
    del body["schema"]
    kind = body.pop("kind")
    if not isinstance(kind, str):
        raise ConfigTypeError(f'{where}: kind is {show(kind)}; give a str such as "cluster"')
    return kind, body


def made_of(made: Callable[..., _Made], fields: Mapping[str, Any], where: str) -> _Made:
    """An object of a document's fields, whose errors are told with `where` in front."""
    try:
        return made(**fields)
    except (ConfigTypeError, ConfigValueError) as error:
        raise type(error)(f"{where}: {error}") from None


def check_keys(body: Mapping[str, Any], where: str, required: Collection[str], optional: Collection[str] = ()) -> None:
    """Raises ConfigKeyError for a key that is missing or unknown."""
    allowed = ", ".join((*required, *optional))
    for key in required:
        if key not in body:
            raise ConfigKeyError(f'{where}: key "{key}" is missing; give {allowed}')
    for key in body:
        if key not in required and key not in optional:
            raise ConfigKeyError(f"{where}: key {show(key)} is unknown; use {allowed}")


def _content(path: str, give: str = _PATH) -> str:
    return read_file(Path(path), "path", give)


def _checked_path(path: object) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigTypeError(f"path is {show(path)}; {_PATH}")
    return os.fspath(path)


def _layout(value: Any, indent: str) -> str:
    inner = indent + "  "
    if isinstance(value, Mapping) and value:
        lines = [f"{inner}{json.dumps(key)}: {_layout(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, (list, tuple)) and any(isinstance(item, (list, tuple, Mapping)) for item in value):
        return "[\n" + ",\n".join(f"{inner}{_layout(item, inner)}" for item in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
