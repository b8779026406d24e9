"""The ops that a saved graph may call, by name.

A file names an op; nothing of a file is imported, looked up as an attribute or run. A name is one of an op of
these namespaces that torch's dispatcher knows, or one of a function that was made known here by the code that has it.

Why: docs/decisions.md, "A graph in a file is data, and verifies".
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from commfuse_fx.ir.core.functions import FUNCTIONS
from commfuse_fx.ir.core.naming import op_name
from commfuse_fx.support.late_imports import import_named

NAMESPACES = ("aten", "prims", "_c10d_functional", "c10d_functional", "commfuse")

OPERATORS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (operator.getitem, operator.add, operator.sub, operator.mul, operator.neg, operator.not_)
}
"""Python operators that graphs call on lists and on numbers."""

_OP = re.compile(r"([A-Za-z_]\w{0,99})\.(\w{1,200})(?:\.(\w{1,200}))?", re.ASCII)

_NAME = re.compile(r"\w{1,200}(?:\.\w{1,200}){0,3}", re.ASCII)


class UnknownOp:
    """Stands for an op that this process does not know, in a graph that is only looked at."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self.__name__} is not known here, and only stands in a graph to be looked at")


def find_any(name: str) -> Any:
    """As `find_target`; a stand-in for an op that it does not know. Raises LookupError for what is no name of an op."""
    try:
        return find_target(name)
    except LookupError:
        if not _NAME.fullmatch(name):
            raise
        return UnknownOp(name)


def find_target(name: str) -> Any:
    """The op or function of this name, as `op_name` writes it. Raises LookupError, which says why there is none."""
    try:
        return _known(name)
    except LookupError:
        if not import_named():
            raise
    return _known(name)


@lru_cache(maxsize=4096)
def _known(name: str) -> Any:
    if name in OPERATORS:
        return OPERATORS[name]
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    match = _OP.fullmatch(name)
    if match is None:
        raise LookupError("no op or function of a graph has this name")
    namespace, op, overload = match.groups()
    if namespace not in NAMESPACES:
        raise LookupError(f"graphs that are read may call ops of {', '.join(NAMESPACES)} only")
    # The dispatcher's own list decides which attributes are looked up: no attribute of torch's Python objects is.
    schemas = torch._C._jit_get_schemas_for_operator(f"{namespace}::{op}")
    wanted = "" if overload in (None, "default") else overload
    if not any(schema.overload_name == wanted for schema in schemas):
        raise LookupError("this version of torch has no such op")
    found = getattr(getattr(getattr(torch.ops, namespace), op), overload or "default")
    if not isinstance(found, torch._ops.OpOverload) or op_name(found) != name:
        raise LookupError("no op of a graph has this name")
    return found


def check_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises TypeError unless the target takes so many arguments, of these names. An unknown op takes any."""
    if not isinstance(target, torch._ops.OpOverload):
        inspect.signature(target).bind(*args, **kwargs)
        return
    arguments = target._schema.arguments
    positional = [argument for argument in arguments if not argument.kwarg_only]
    if len(args) > len(positional):
        raise TypeError(f"it takes {len(positional)} positional argument(s), not {len(args)}")
    given = {argument.name for argument in positional[: len(args)]}
    names = {argument.name for argument in arguments}
    for key in kwargs:
        if key not in names or key in given:
            raise TypeError(f"it has no argument {key[:80]!r}, or has it already")
    for argument in arguments:
        if argument.name not in given and argument.name not in kwargs and not argument.has_default_value():
            raise TypeError(f"its argument {argument.name!r} is missing")
