"""A pipeline as it is written on the command line: `a,b(option=value),c`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.support.strict_json import TYPED, parse_json

_PASS = re.compile(r"\s*(\w+)\s*(?:\((.*)\))?\s*", re.ASCII | re.DOTALL)
_OPTION = re.compile(r"\s*(\w+)\s*=(.*)", re.ASCII | re.DOTALL)
_OPEN, _CLOSE = "([{", ")]}"
_WORDS = {"true": True, "false": False, "none": None, "null": None}

Written = list[tuple[str, dict[str, Any]]]


def parse_passes(text: str, where: str = "--passes") -> Written:
    """(name of a pass, its options as plain data), in order.

    A value is JSON, or a word: true, false, none, or a text without quotes; in a list of words as well.
    Raises ConfigValueError, which names `where` and what cannot be read.
    """
    found: Written = []
    for part in _split(text, where):
        match = _PASS.fullmatch(part)
        if match is None:
            raise ConfigValueError(f"{where}: {part.strip()[:80]!r} is no pass; write name or name(option=value,...)")
        found.append((match[1], _options(match[2] or "", f"{where}, pass {match[1]}")))
    if not found:
        raise ConfigValueError(f"{where} is empty; give names of passes, joined by commas")
    return found


def _options(text: str, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in _split(text, where):
        match = _OPTION.fullmatch(part)
        if match is None:
            raise ConfigValueError(f"{where}: {part.strip()[:80]!r} is no option; write option=value")
        if match[1] in found:
            raise ConfigValueError(f"{where}: option {match[1]} is given twice; give it once")
        found[match[1]] = _value(match[2].strip(), f"{where}, option {match[1]}")
    return found


def _value(text: str, where: str) -> Any:
    if not text:
        raise ConfigValueError(f"{where} has no value; write option=value")
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return parse_json(text, where, TYPED)
    except ConfigValueError:
        pass
    if text.startswith("[") and text.endswith("]"):
        return [_value(part.strip(), where) for part in _split(text[1:-1], where)]
    if text[0] in '{["':
        raise ConfigValueError(f"{where} is {text[:80]!r}, which is no JSON")
    return text


def _split(text: str, where: str) -> Iterator[str]:
    """Parts at commas that are in no bracket and in no quotes."""
    begin, quoted, escaped = 0, False, False
    open_brackets: list[str] = []
    for at, character in enumerate(text):
        if quoted:
            quoted = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            quoted = True
        elif character in _OPEN:
            open_brackets.append(_CLOSE[_OPEN.index(character)])
        elif character in _CLOSE:
            if not open_brackets or open_brackets.pop() != character:
                raise ConfigValueError(f"{where}: {character!r} at {text[: at + 1][-40:]!r} closes no bracket")
        elif character == "," and not open_brackets:
            yield text[begin:at]
            begin = at + 1
    if quoted or open_brackets:
        missing = '"' if quoted else open_brackets[-1]
        raise ConfigValueError(f"{where}: {missing!r} is missing at the end of {text[-40:]!r}")
    if text[begin:].strip() or begin:
        yield text[begin:]
