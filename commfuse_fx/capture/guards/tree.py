"""Flatten the arguments of a call into tensors and a structure that can serve as a cache key.

torch's pytree does not flatten dataclasses that are not registered, but users pass them to models, so this module does.
All values that are not tensors become part of the structure, so a new value means a new graph.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import PurePath
from types import BuiltinFunctionType, EllipsisType, FunctionType, ModuleType
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from commfuse_fx.capture.guards.numpy_types import SCALARS
from commfuse_fx.errors import CaptureError, ConfigTypeError

PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    slice,
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
)
"""Types whose values are constants of a graph."""

_CONSTANTS = (*PLAIN, *SCALARS, enum.Enum, range, EllipsisType, PurePath, type, BuiltinFunctionType)


@dataclasses.dataclass(frozen=True)
class Structure:
    """The structure of nested containers, from which they can be rebuilt with other tensors. It is hashable.

    kind: "tensor", "constant", or a kind of container. key: the type, with the names of the items or the constant.
    children: the structures of the items.
    """

    kind: str
    key: Any = None
    children: tuple[Structure, ...] = ()
    # Rebuilding needs a pattern object of the same class; it plays no part in equality.
    pattern: Any = dataclasses.field(default=None, compare=False, repr=False)


_TENSOR = Structure("tensor")


def flatten(value: Any, path: str) -> tuple[list[tuple[str, torch.Tensor]], Structure]:
    """Split `value` into its tensors, each with a path such as `input.mask`, and its structure.

    Raises ConfigTypeError, naming the path and the type, for objects that are neither tensors, constants, containers
    (dict, list, tuple, named tuple, dataclass) nor of a class that is registered with torch's pytree: a tensor hidden
    in one would silently become a constant of the graph.
    """
    leaves: list[tuple[str, torch.Tensor]] = []
    return leaves, _flatten(value, path, leaves)


def flatten_output(value: Any, path: str) -> tuple[list[tuple[str, torch.Tensor]], Structure]:
    """Split what a model returns into its tensors, each with a path, and its structure.

    Other objects than containers are flattened by their attributes; an object without attributes is a constant. Raises
    CaptureError for an object that holds itself.
    """
    leaves: list[tuple[str, torch.Tensor]] = []
    return leaves, _flatten(value, path, leaves, _attributes)


def argument_path(path: str) -> str:
    """`input.0`, `input.mask` and `target` from the paths of the flattened arguments."""
    return path.removeprefix(".").replace("input.args.", "input.").replace("input.kwargs.", "input.")


def _refuse(value: Any, path: str, why: str = "is not understood") -> NoReturn:
    kind = type(value).__name__
    raise ConfigTypeError(
        f"argument {argument_path(path)} of type {kind} {why}: register the class with torch.utils._pytree, or use the "
        'module form with capture="dynamo"; or pass tensors, numbers, strings, None, or dict, list, tuple and '
        "dataclass of these"
        + (" (numpy arrays: torch.from_numpy)" if type(value).__module__ == "numpy" else "")
        + ". register_pytree_node and register_dataclass are for classes that hold tensors, register_constant is for "
        "those that hold none"
    )


def _registered(value: Any, path: str, leaves: list[tuple[str, torch.Tensor]]) -> Structure:
    """An object of a class that is registered with torch's pytree, from what its functions say."""
    node = pytree.SUPPORTED_NODES.get(type(value))
    if node is None:
        _refuse(value, path)
    items, context = node.flatten_fn(value)
    children = tuple(_flatten(item, f"{path}.{number}", leaves) for number, item in enumerate(items))
    key = type(value), tuple(range(len(children))), _as_key(context, value, path)
    return Structure("registered", key, children, pattern=(node.unflatten_fn, context))


def _as_key(context: Any, value: Any, path: str) -> Hashable:
    """What a registered class keeps besides its items, as it is now: a list in it may change later."""
    if isinstance(context, Mapping):
        return type(context), tuple((key, _as_key(item, value, path)) for key, item in context.items())
    if isinstance(context, (list, tuple)):
        return type(context), tuple(_as_key(item, value, path) for item in context)
    if isinstance(context, torch.Tensor):
        _refuse(value, path, "is registered with a context that holds a tensor, which belongs to its items")
    try:
        hash(context)
    except TypeError:
        _refuse(value, path, f"is registered with a context that cannot be hashed ({type(context).__name__})")
    return type(context), repr(context) if isinstance(context, _SIGNED) else context


_SIGNED = (float, complex)
"""Compared as text: -0.0 differs from 0.0, and NaN equals NaN."""


_NO_CONSTANTS = frozenset([dict, list, tuple])


def _is_constant(value: Any) -> bool:
    """Whether a value is compared by equality, or is code without variables around it."""
    if isinstance(value, FunctionType):
        return value.__closure__ is None
    return isinstance(value, _CONSTANTS) or (isinstance(value, frozenset) and all(map(_is_constant, value)))


def _constant_key(value: Any) -> Hashable:
    if isinstance(value, slice):
        return tuple(map(_constant_key, (value.start, value.stop, value.step)))
    if isinstance(value, frozenset):
        return frozenset((type(each), _constant_key(each)) for each in value)
    if isinstance(value, FunctionType) and not (value.__defaults__ or value.__kwdefaults__ or vars(value)):
        return value.__code__, id(value.__globals__)  # a lambda is another object in each call
    return type(value), repr(value) if isinstance(value, (*_SIGNED, *SCALARS)) else value


def _attributes(value: Any, path: str) -> tuple[str, list[tuple[Any, Any]]]:
    if isinstance(value, (type, ModuleType, FunctionType, torch.nn.Module)) or not hasattr(value, "__dict__"):
        return "constant", []
    if path.count(".") > _DEEPEST:
        raise CaptureError(
            f"the model's {path[:80]}... is part of an object that holds itself, of type {type(value).__name__}: "
            "return tensors, or dict, list, tuple and dataclass of tensors"
        )
    return "object", list(vars(value).items())


_DEEPEST = 40
"""How deep attributes of attributes are flattened. A deeper object is taken for one that holds itself."""

Unknown = Callable[[Any, str], tuple[str, list[tuple[Any, Any]]]]
"""A function that handles an object which is no container: (value, path) -> kind and items."""


def _flatten(
    value: Any, path: str, leaves: list[tuple[str, torch.Tensor]], unknown: Unknown | None = None
) -> Structure:
    """unknown: for what is returned. An argument that is no container is one of a registered class, or refused."""
    if isinstance(value, torch.Tensor):
        leaves.append((path, value))
        return _TENSOR
    if type(value) not in _NO_CONSTANTS and _is_constant(value):  # most of what is asked about
        return Structure("constant", (type(value), _constant_key(value)), pattern=value)
    kind, items = _children(value)
    if unknown is None and (items is None or (kind == "dataclass" and type(value) in pytree.SUPPORTED_NODES)):
        return _registered(value, path, leaves)
    if items is None:
        assert unknown is not None, "an argument would be refused"
        kind, items = unknown(value, path)
        if kind == "constant":
            return Structure(kind, (type(value), id(value)), pattern=value)
    children = tuple(_flatten(item, f"{path}.{name}", leaves, unknown) for name, item in items)
    # A structure is kept with its graph, which has no need of the first call's tensors.
    pattern = type(value)() if type(value) in (dict, list, tuple) else value
    return Structure(kind, (type(value), tuple(name for name, _ in items)), children, pattern=pattern)


def _children(value: Any) -> tuple[str, list[tuple[Any, Any]] | None]:
    if isinstance(value, Mapping):
        return "mapping", list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "namedtuple", list(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple)):
        return "sequence", list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "dataclass", [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return "", None


def unflatten(structure: Structure, tensors: Iterator[torch.Tensor]) -> Any:
    """Rebuild the value with other tensors in the places of the old ones."""
    if structure.kind == "tensor":
        return next(tensors)
    if structure.kind == "constant":
        return structure.pattern
    names = structure.key[1]
    items = [unflatten(child, tensors) for child in structure.children]
    return _REBUILD[structure.kind](structure.pattern, names, items)


def _rebuild_mapping(pattern: Any, names: tuple[Any, ...], items: list[Any]) -> Any:
    made = dict(zip(names, items, strict=True))
    if type(pattern) is dict:
        return made
    clone = copy.copy(pattern)
    for name, item in made.items():
        clone[name] = item
    return clone


def _rebuild_dataclass(pattern: Any, names: tuple[str, ...], items: list[Any]) -> Any:
    clone = copy.copy(pattern)  # keeps fields with init=False, and skips __post_init__ as a copy should
    for name, item in zip(names, items, strict=True):
        object.__setattr__(clone, name, item)
    return clone


_REBUILD: dict[str, Callable[[Any, Any, list[Any]], Any]] = {
    "mapping": _rebuild_mapping,
    "namedtuple": lambda pattern, names, items: type(pattern)(*items),
    "sequence": lambda pattern, names, items: type(pattern)(items),
    "dataclass": _rebuild_dataclass,
    "object": _rebuild_dataclass,
    "registered": lambda pattern, names, items: pattern[0](items, pattern[1]),
}
