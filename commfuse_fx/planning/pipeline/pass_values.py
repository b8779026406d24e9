"""Options of passes as plain data, for files and for the command line. All of them are scalars.

Why: docs/decisions.md, "Options of passes are scalars".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Any

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import Pass, Scalar
from commfuse_fx.planning.pipeline.registry import PassEntry, PassOption
from commfuse_fx.support.checks import check_bool, is_int, show

GROUP = "group"
"""Name of an option that says over which mesh axes a pass works."""

_OR_NONE = " | None"


@dataclass(frozen=True)
class _Form:
    """How values of one type are checked. hint: what a user may give."""

    read: Callable[[Any, str, Program], Scalar]
    hint: str


def options_to_dict(entry: PassEntry, made: Pass) -> dict[str, Scalar]:
    """Every option of a pass that was made."""
    return {option.name: getattr(made, option.name) for option in entry.options}


def option_from_data(entry: PassEntry, name: str, value: Any, program: Program) -> Scalar:
    """The value of an option, as `options_to_dict` gives it.

    Raises ConfigKeyError for an unknown option, ConfigTypeError or ConfigValueError for a bad value.
    """
    option = entry.option(name)
    if value is None and option.type.endswith(_OR_NONE):
        return None
    return _form(option).read(value, f"pass {entry.name}, option {name}", program)


def hint_of(option: PassOption) -> str:
    """What a user may give for it."""
    return f"{_form(option).hint}, or none" if option.type.endswith(_OR_NONE) else _form(option).hint


def default_text(option: PassOption) -> str:
    """The default as a user would write it; "" where there is none."""
    if option.required:
        return ""
    value = option.default
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _form(option: PassOption) -> _Form:
    return _AXES if option.name == GROUP else _FORMS[option.type.removesuffix(_OR_NONE)]


def _bool(value: Any, where: str, program: Program) -> bool:
    return check_bool(value, where)


def _int(value: Any, where: str, program: Program) -> int:
    if not is_int(value):
        raise ConfigTypeError(f"{where} is {show(value)}; give an int")
    if value < 0:
        raise ConfigValueError(f"{where} is {value}; give an int >= 0")
    return value


def _float(value: Any, where: str, program: Program) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigTypeError(f"{where} is {show(value)}; give a number")
    if not 0 <= value < inf:
        raise ConfigValueError(f"{where} is {value}; give a number >= 0")
    return float(value)


def _text(value: Any, where: str, program: Program) -> str:
    if not isinstance(value, str):
        raise ConfigTypeError(f"{where} is {show(value)}; give a text")
    return value


def _axes(value: Any, where: str, program: Program) -> str:
    if not isinstance(value, str):
        raise ConfigTypeError(f"{where} is {show(value)}; give mesh axes such as {program.mesh.all_axes}")
    for axis in value.split(","):
        if axis not in program.mesh.names:
            raise ConfigValueError(f"{where} is {show(value)}; the axes of this mesh are {program.mesh.all_axes}")
    return value


_AXES = _Form(_axes, "mesh axes joined by commas")

_FORMS: Mapping[str, _Form] = MappingProxyType(
    {
        "bool": _Form(_bool, "true or false"),
        "float": _Form(_float, "number >= 0"),
        "int": _Form(_int, "int >= 0"),
        "str": _Form(_text, "text"),
    }
)
"""Type of an option, as a pass writes it -> its form."""
