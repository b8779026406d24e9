"""Options of passes as plain data, for files and for the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Any

from commfuse_fx.config.fusion_config import FusionConfig
from commfuse_fx.config.plain_data import fusion_from_dict, fusion_to_dict
from commfuse_fx.cost.model import cost_model
from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.ir.json.values import ValueReader
from commfuse_fx.ir.program import Program
from commfuse_fx.planning.registry import PassEntry, PassOption
from commfuse_fx.sharding.marking.marks import Marks
from commfuse_fx.sharding.marking.marks_json import marks_from_dict, marks_to_dict
from commfuse_fx.support.checks import check_bool, is_int, show

OWN_COSTS = "cluster"
"""What stands for the prices of the program's own cluster."""


@dataclass(frozen=True)
class _Form:
    """How the values of one type are written. hint: what a user may give."""

    write: Callable[[Any], Any]
    read: Callable[[Any, str, Program], Any]
    hint: str


def options_to_dict(entry: PassEntry, made: Any) -> dict[str, Any]:
    """Every option of a pass that was made, as plain data."""
    return {option.name: _FORMS[option.type].write(getattr(made, option.name)) for option in entry.options}


def option_from_data(entry: PassEntry, name: str, value: Any, program: Program) -> Any:
    """The value of an option, from what `options_to_dict` writes for it.

    Raises ConfigKeyError for an unknown option, ConfigTypeError or ConfigValueError for a bad value.
    """
    option = entry.option(name)
    return _FORMS[option.type].read(value, f"pass {entry.name}, option {name}", program)


def hint_of(option: PassOption) -> str:
    """What a user may give for it."""
    return _FORMS[option.type].hint


def default_text(option: PassOption) -> str:
    """The default as a user would write it; "" where there is none."""
    if option.required:
        return ""
    value = _FORMS[option.type].write(option.default)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


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


def _group(value: Any, where: str, program: Program) -> str:
    if not isinstance(value, str):
        raise ConfigTypeError(f"{where} is {show(value)}; give mesh axes such as {program.mesh.all_axes}")
    for axis in value.split(","):
        if axis not in program.mesh.names:
            raise ConfigValueError(f"{where} is {show(value)}; the axes of this mesh are {program.mesh.all_axes}")
    return value


def _names(value: Any, where: str, program: Program) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigTypeError(f"{where} is {show(value)}; give a list of names such as [x, y]")
    return tuple(value)


def _costs(value: Any, where: str, program: Program) -> Any:
    if value != OWN_COSTS:
        raise ConfigValueError(f'{where} is {show(value)}; give "{OWN_COSTS}", the cluster of the graph')
    if program.config.cluster is None:
        raise ConfigValueError(f"{where}: the graph was compiled without a cluster; give one with --cluster")
    return cost_model(program.config.cluster)


def _fusion(value: Any, where: str, program: Program) -> FusionConfig:
    return fusion_from_dict(value, where)


def _marks(value: Any, where: str, program: Program) -> Marks:
    return marks_from_dict(value, where)


def _layouts(value: Any, where: str, program: Program) -> Any:
    reader = ValueReader(where)
    found: dict[str, tuple[tuple[str, Any], ...]] = {}
    for name, pairs in reader.typed(value, dict, "the layouts").items():
        layout: list[tuple[str, Any]] = []
        for i, pair in enumerate(reader.typed(pairs, list, name)):
            if not isinstance(pair, list) or len(pair) != 2:
                raise ConfigValueError(f"{where}, {name}[{i}] is {show(pair)}; give [group, placement]")
            placement = None if pair[1] is None else reader.placement(pair[1], name)
            layout.append((reader.typed(pair[0], str, name), placement))
        found[name] = tuple(layout)
    return found


def _write_layouts(value: Any) -> Any:
    return {
        name: [[group, None if placement is None else str(placement)] for group, placement in layout]
        for name, layout in value.items()
    }


def _optional(form: _Form) -> _Form:
    return _Form(
        lambda value: None if value is None else form.write(value),
        lambda value, where, program: None if value is None else form.read(value, where, program),
        f"{form.hint}, or none",
    )


def _same(value: Any) -> Any:
    return value


_INT = _Form(_same, _int, "int >= 0")
_GROUP = _Form(_same, _group, "mesh axes joined by commas")
_COSTS = _Form(lambda value: OWN_COSTS, _costs, OWN_COSTS)
_LAYOUTS = _Form(_write_layouts, _layouts, "as captured.json says")

_FORMS: Mapping[str, _Form] = MappingProxyType(
    {
        "bool": _Form(_same, _bool, "true or false"),
        "float": _Form(_same, _float, "number >= 0"),
        "int": _INT,
        "int | None": _optional(_INT),
        "str": _GROUP,
        "str | None": _optional(_GROUP),
        "tuple[str, ...]": _Form(list, _names, "list of paths of inputs"),
        "FusionConfig": _Form(fusion_to_dict, _fusion, "object as for comm_fusion="),
        "CostModel": _COSTS,
        "CostModel | None": _optional(_COSTS),
        "Marks": _Form(marks_to_dict, _marks, "as captured.json says"),
        "Layouts | None": _optional(_LAYOUTS),
    }
)
"""Type of an option, as a pass writes it -> its form."""
