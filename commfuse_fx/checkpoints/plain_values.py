"""Plain values as JSON and back: what a checkpoint holds besides tensors, each of its own type.

JSON has no tuples, no keys but text, and neither infinity nor bytes. An object with one key that begins with "$" stands
for such a value: {"$tuple": [1, 2]}. Nothing that is read here is ever run.
"""

from __future__ import annotations

import base64
import binascii
import numbers
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import torch

from commfuse_fx.errors import CheckpointError
from commfuse_fx.support.checks import is_unicode, show

Leaf = Callable[[str, Any], str | None]
"""Gets a path and a value, and returns the name of the tensor that the value stands for; None if it stands for none."""

MOST_NESTED = 64
"""How deep dicts, lists and tuples may be nested. What is written here has to be read with any stack of a caller."""

_SLACK = 16
"""A set is a leaf for `replaced`, and may hold tuples."""

_SEQUENCES: dict[str, type] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
_MAPPINGS: dict[str, type] = {"$dict": dict, "$ordered": OrderedDict, "$counter": Counter}


def encoded(value: Any, path: str, leaf: Leaf) -> Any:
    """The JSON value that stands for a plain value. Raises CheckpointError for anything else, with its path."""
    name = leaf(path, value)
    if name is not None:
        return {"$tensor": name}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and is_unicode(value):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if isfinite(number) else {"$float": repr(number)}
    if isinstance(value, complex):
        return {"$complex": [encoded(part, path, leaf) for part in (value.real, value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return _mapping(value, path, leaf)
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [encoded(item, f"{path}/{number}", leaf) for number, item in enumerate(value)]
        kind = next((kind for kind, made in _SEQUENCES.items() if isinstance(value, made)), None)
        return items if kind is None else {kind: items}
    raise CheckpointError(
        f"{path} is {show(value)} of type {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        "cannot hold: give numbers, texts, tensors, and lists, tuples and dicts of them, or an object that has "
        "state_dict() and load_state_dict()"
    )


def _mapping(value: Mapping[Any, Any], path: str, leaf: Leaf) -> Any:
    kind = next(kind for kind, made in reversed(_MAPPINGS.items()) if kind == "$dict" or isinstance(value, made))
    if kind == "$dict" and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encoded(item, f"{path}/{key}", leaf) for key, item in value.items()}
    return {kind: [[encoded(key, path, leaf), encoded(item, f"{path}/{key}", leaf)] for key, item in value.items()]}


def decoded(value: Any, tensor: Callable[[str], Any], depth: int = 0) -> Any:
    """The inverse of `encoded`. tensor: gives what a name of a tensor stands for. depth: in how many values it is.

    Raises CheckpointError for what `encoded` has not made.
    """
    if not isinstance(value, (list, dict)):
        return value
    if depth > MOST_NESTED + _SLACK:
        raise CheckpointError(f"{show(value)[:80]} is nested more than a checkpoint holds: take another one")
    depth += 1
    if isinstance(value, list):
        return [decoded(item, tensor, depth) for item in value]
    tags = [key for key in value if key.startswith("$")]
    if not tags:
        return {key: decoded(item, tensor, depth) for key, item in value.items()}
    tag, given = tags[0], value[tags[0]]
    try:
        if len(value) > 1:
            raise ValueError(tag)
        return _tagged(tag, given, tensor, depth)
    except (ValueError, TypeError, binascii.Error):
        raise CheckpointError(f"{show(value)} stands for no value that a checkpoint holds") from None


def _tagged(tag: str, given: Any, tensor: Callable[[str], Any], depth: int) -> Any:
    if tag == "$tensor":
        return tensor(given)
    if tag == "$float":
        return float(given)
    if tag == "$complex":
        return complex(*(decoded(part, tensor, depth) for part in given))
    if tag == "$bytes":
        return base64.b64decode(given, validate=True)
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](decoded(item, tensor, depth) for item in given)
    if tag in _MAPPINGS:
        return _MAPPINGS[tag]({decoded(key, tensor, depth): decoded(item, tensor, depth) for key, item in given})
    raise ValueError(tag)


def replaced(value: Any, leaf: Callable[[str, Any], Any], path: str = "", depth: int = 0) -> Any:
    """A copy of nested dicts, lists and tuples. leaf: gets the path of anything else and the value, and replaces it.

    depth: in how many of them the value is. Raises CheckpointError for more than MOST_NESTED.
    """
    if depth > MOST_NESTED:
        raise CheckpointError(
            f"{path[:80]}... is nested more than {MOST_NESTED} deep, or is a part of itself, which a checkpoint cannot "
            "hold: give values that are nested less"
        )

    def inner(key: object, item: Any) -> Any:
        return replaced(item, leaf, f"{path}/{key}" if path else str(key), depth + 1)

    if isinstance(value, Mapping):
        items = {key: inner(key, item) for key, item in value.items()}
        made: type = next((made for made in (OrderedDict, Counter) if isinstance(value, made)), dict)
        return made(items)
    if isinstance(value, (list, tuple)):
        parts = [inner(number, item) for number, item in enumerate(value)]
        if isinstance(value, list):
            return parts
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return leaf(path, value)


def is_plain(value: Any) -> bool:
    """Whether a value is plain but for tensors."""
    try:
        encoded(value, "", lambda _, each: "" if isinstance(each, torch.Tensor) else None)
    except CheckpointError:
        return False
    return True
