"""Values of a saved graph as JSON, and back: specs of tensors, arguments of ops, layouts.

What JSON has no value for is an object of one key: `{"node": name}`, `{"tuple": [...]}`, `{"dtype": "f32"}`,
`{"device": "cpu"}`, `{"layout": "strided"}`, `{"memory_format": "contiguous_format"}`, `{"number": "-inf"}` and
`{"complex": [real, imaginary]}`. Anything else is `{"text": ...}`, which people can read, but `ArgumentReader` refuses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.meta import Spec, TensorSpec, dtype_name, info
from commfuse_fx.ir.core.placement import P, Placement, R, Shard
from commfuse_fx.support.json_fields import Fields

_DEEPEST = 16  # lists in lists; graphs have two

DTYPES = {dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
LAYOUTS = {_name: value for _name, value in vars(torch).items() if isinstance(value, torch.layout)}
MEMORY_FORMATS = {_name: value for _name, value in vars(torch).items() if isinstance(value, torch.memory_format)}
_NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}

DEVICE = re.compile(r"[a-z]{1,20}(:\d{1,4})?", re.ASCII)
_SHARD = re.compile(r"S\((\d{1,3})(?:;(\d{1,9}))?\)", re.ASCII)


def write_spec(spec: Spec) -> Any:
    """A tensor as an object, several as a list, None as it is. The device is left out where it is the CPU."""
    if isinstance(spec, TensorSpec):
        record = {"dtype": dtype_name(spec.dtype), "shape": list(spec.shape), "stride": list(spec.stride)}
        return record if spec.device == "cpu" else {**record, "device": spec.device}
    return None if spec is None else [write_spec(item) for item in spec]


def write_value(value: Any) -> Any:
    """An argument of an op."""
    if isinstance(value, fx.Node):
        return {"node": info(value).name}
    if isinstance(value, tuple):
        return {"tuple": [write_value(item) for item in value]}
    if isinstance(value, list):
        return [write_value(item) for item in value]
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, (torch.layout, torch.memory_format)):
        kind = "layout" if isinstance(value, torch.layout) else "memory_format"
        return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, complex):
        return {"complex": [write_value(value.real), write_value(value.imag)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return {"text": str(value).removeprefix("torch.")}


class ValueReader(Fields):
    """Reads what the functions above wrote. Raises ConfigValueError, naming document and place."""

    def dtype(self, value: Any, place: str) -> torch.dtype:
        found: torch.dtype = self.known(DTYPES, value, "dtype", place)
        return found

    def device(self, value: Any, place: str) -> str:
        text: str = self.typed(value, str, place)
        if DEVICE.fullmatch(text):
            try:
                torch.device(text)
            except RuntimeError:
                pass
            else:
                return text
        raise self.error(place, f"{text[:40]!r} is no device such as cpu or cuda:0")

    def known(self, values: Mapping[str, Any], name: Any, what: str, place: str) -> Any:
        if not isinstance(name, str) or name not in values:
            raise self.error(place, f"{str(name)[:40]!r} is no {what} that this version of torch has")
        return values[name]

    def spec(self, value: Any, place: str, depth: int = 0) -> Spec:
        if value is None:
            return None
        if isinstance(value, list):
            if depth > _DEEPEST:
                raise self.error(place, "a value is nested too deeply")
            return tuple(self.spec(each, f"{place}[{i}]", depth + 1) for i, each in enumerate(value))
        if not isinstance(value, dict):
            raise self.error(place, "this is neither a tensor nor a list of them")
        return self.tensor(value, place)

    def tensor(self, value: Mapping[str, Any], place: str) -> TensorSpec:
        shape = tuple(self.items(value, "shape", int, place))
        stride = tuple(self.items(value, "stride", int, place))
        if len(shape) != len(stride) or min((*shape, *stride), default=0) < 0:
            raise self.error(place, "shape and stride are not as many numbers >= 0")
        dtype = self.dtype(self.get(value, "dtype", str, place), f"{place}.dtype")
        device = self.device(value.get("device", "cpu"), f"{place}.device")
        try:
            torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        except (RuntimeError, OverflowError, TypeError):
            raise self.error(place, f"no tensor can have the shape {shape} and the stride {stride}"[:300]) from None
        return TensorSpec(shape, dtype, stride, device)

    def placement(self, value: Any, place: str) -> Placement:
        text: str = self.typed(value, str, place)
        if text in ("R", "P"):
            return R if text == "R" else P
        match = _SHARD.fullmatch(text)
        if match is None or match[2] == "0":
            raise self.error(place, f"{text[:40]!r} is no placement such as R, P or S(0)")
        return Shard(int(match[1]), int(match[2] or 1))


class ArgumentReader(ValueReader):
    """Also reads arguments of ops; `nodes` are those that may be named."""

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self.nodes: dict[str, fx.Node] = {}

    def reference(self, value: Any, place: str) -> fx.Node:
        """The node that `{"node": name}` names."""
        name = value.get("node") if isinstance(value, dict) and len(value) == 1 else None
        if not isinstance(name, str):
            raise self.error(place, 'this is no {"node": name}')
        if name not in self.nodes:
            raise self.error(place, f"it refers to {name[:80]!r}, and no node before it has this name")
        return self.nodes[name]

    def value(self, value: Any, place: str, depth: int = 0) -> Any:
        if depth > _DEEPEST:
            raise self.error(place, "a value is nested too deeply")
        if isinstance(value, list):
            return [self.value(each, f"{place}[{i}]", depth + 1) for i, each in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if len(value) != 1:
            raise self.error(place, "an object here has one key")
        (kind, content), where = next(iter(value.items())), place
        if kind == "node":
            return self.reference(value, place)
        if kind == "tuple":
            return tuple(self.value(self.typed(content, list, where), where, depth + 1))
        if kind == "dtype":
            return self.dtype(content, where)
        if kind == "device":
            return torch.device(self.device(content, where))
        if kind == "layout":
            return self.known(LAYOUTS, content, "layout", where)
        if kind == "memory_format":
            return self.known(MEMORY_FORMATS, content, "memory format", where)
        if kind == "number":
            return self.known(_NUMBERS, content, "number", where)
        if kind == "complex":
            return self._complex(content, where)
        if kind == "text":
            raise self.error(where, f"the value {str(content)[:80]!r} was written for people and cannot be read back")
        raise self.error(place, f"{kind[:40]!r} is no kind of value")

    def _complex(self, content: Any, place: str) -> complex:
        parts = self.typed(content, list, place)
        numbers = [self.value(each, place, _DEEPEST) for each in parts]
        if len(numbers) != 2 or not all(isinstance(each, float) for each in numbers):
            raise self.error(place, "a complex number is two numbers")
        return complex(*numbers)
