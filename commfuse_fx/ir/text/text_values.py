"""Reads the values in a line of canonical text: what a node yields, and the arguments of its call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.meta import Spec, TensorSpec, contiguous_stride
from commfuse_fx.ir.ops.known_ops import check_call
from commfuse_fx.ir.ops.values import DEVICE, DTYPES, LAYOUTS, MEMORY_FORMATS
from commfuse_fx.ir.text.text_lines import argument_tokens

_TENSOR = re.compile(r"(\w+)\[([\d,]*)\](?:\(([\d,]*)\))?")
_MORE = re.compile(r"\.\.\. (\d{1,9})")
_INT = re.compile(r"-?\d{1,19}")
_KEYWORD = re.compile(r"([A-Za-z_]\w*)=")
_CONSTANTS: dict[str, Any] = {"None": None, "True": True, "False": False}


class Unfinished(tuple[Spec, ...]):
    """The first specs of several; the text leaves the others out. `total`: how many there are in all."""

    total: int

    @classmethod
    def of(cls, specs: tuple[Spec, ...], total: int) -> Unfinished:
        made = cls(specs)
        made.total = total
        return made


def read_spec(text: str, device: str) -> Spec:
    """The spec that `spec_text` has written; an Unfinished one where that has left some out. Raises ValueError."""
    if text in ("-", "number"):
        return None
    if not text.startswith("("):
        return _tensor(text, device)
    if not text.endswith(")"):
        raise ValueError(f"{text[:40]!r} has an open parenthesis")
    items = _items(text[1:-1])
    more = _MORE.fullmatch(items[-1]) if items else None
    specs = tuple(read_spec(item, device) for item in (items[:-1] if more else items))
    return Unfinished.of(specs, int(more[1])) if more else specs


def _items(text: str) -> list[str]:
    """Split at the ", " that stand in no parentheses."""
    found: list[str] = []
    depth = 0
    for piece in text.split(", ") if text else ():
        if depth:
            found[-1] += f", {piece}"
        else:
            found.append(piece)
        depth += piece.count("(") - piece.count(")")
    return found


def _tensor(text: str, device: str) -> TensorSpec:
    if text == "*":
        raise ValueError("the size is left out (*); give the text of Lowered.text(), which has all sizes")
    match = _TENSOR.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is no tensor such as f32[2,3], nor several such as (f32[2], i64[])")
    if match[1] not in DTYPES:
        raise ValueError(f"{match[1][:40]!r} is no dtype such as f32, bf16 or i64")
    shape = _numbers(match[2])
    stride = contiguous_stride(shape) if match[3] is None else _numbers(match[3])
    if len(stride) != len(shape):
        raise ValueError(f"{text[:40]!r} has not as many strides as sizes")
    return TensorSpec(shape, DTYPES[match[1]], stride, device)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(",")) if text else ()
    except ValueError:
        raise ValueError(f"{text[:40]!r} are no numbers separated by commas") from None


def read_call(target: Any, text: str, nodes: Mapping[str, fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call by position and by name.

    A text does not tell a list from a tuple: both are lists. What the op declares decides whether a word is a text.
    Raises UnknownReference, ValueError.
    """
    positions, names = _declared(target)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for tokens in _split(list(argument_tokens(text, nodes))):
        keyword = _KEYWORD.match(tokens[0])
        if keyword and keyword[1] in names:
            rest = [tokens[0][keyword.end() :], *tokens[1:]]
            kwargs[keyword[1]] = _argument([each for each in rest if each], names[keyword[1]], nodes)
        elif kwargs:
            raise ValueError("an argument without a name stands behind one with a name")
        else:
            declared = positions[len(args)] if len(args) < len(positions) else ""
            args.append(_argument(tokens, declared, nodes))
    try:
        check_call(target, args, kwargs)
    except TypeError as error:
        raise ValueError(f"the op is called wrongly: {str(error)[:200]}") from None
    return tuple(args), kwargs


@lru_cache(maxsize=1024)
def _declared(target: Any) -> tuple[tuple[str, ...], dict[str, str]]:
    """What the op declares of its arguments, by position and by name."""
    if isinstance(target, torch._ops.OpOverload):
        arguments = target._schema.arguments
        positions = tuple(str(each.type) for each in arguments if not each.kwarg_only)
        return positions, {each.name: str(each.type) for each in arguments}
    names = {name: str(each.annotation) for name, each in inspect.signature(target).parameters.items()}
    return tuple(names.values()), names


def _split(tokens: list[str]) -> list[list[str]]:
    """The tokens of each argument."""
    found: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token == "[") - (token == "]")
        if token == ", " and depth == 0:
            found.append([])
        else:
            found[-1].append(token)
    if not all(found) and tokens:
        raise ValueError("an argument is empty")
    return found if tokens else []


def _argument(tokens: list[str], declared: str, nodes: Mapping[str, fx.Node]) -> Any:
    if not tokens:
        raise ValueError("an argument is empty")
    if tokens[0] == "[" and tokens[-1] == "]":
        return [_argument(each, declared, nodes) for each in _split(tokens[1:-1])]
    if len(tokens) == 1 and tokens[0].startswith("%"):
        return nodes[tokens[0][1:]]
    return _word("".join(tokens), declared)


def _word(text: str, declared: str) -> Any:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if "str" in declared:
        return text
    if text == "*":
        raise ValueError("a number is left out (*); give the text of Lowered.text(), which has all numbers")
    for known in (DTYPES, MEMORY_FORMATS, LAYOUTS):
        if text in known:
            return known[text]
    for number in (int,) if _INT.fullmatch(text) else (float, complex):
        try:
            return number(text)
        except ValueError:
            pass
    try:
        if DEVICE.fullmatch(text):
            return torch.device(text)
    except RuntimeError:
        pass
    if "Any" in declared:  # as torch declares the name of a group
        return text
    raise ValueError(f"{text[:40]!r} is no number, dtype, device, layout or memory format")
