"""The option `comm_fusion`: which collectives of each kind are fused, and how large a fused one may grow.

Why: docs/decisions.md, "No fusion id and fusion id 0 differ, and None counts as not given".
Why: docs/decisions.md, "`size` counts MiB of what travels, `index` counts parameters".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from commfuse_fx.errors import ConfigKeyError, ConfigTypeError, ConfigValueError
from commfuse_fx.machine.source import resolve_costs
from commfuse_fx.support.checks import check_bool, is_int, show

MIB = 1 << 20
AUTO_THRESHOLD_MIB = 64
"""The threshold of mode "auto"."""

KINDS = ("allreduce", "allgather", "reducescatter")
_KIND_OF_OP: Mapping[str, str] = MappingProxyType(
    {"all_reduce": "allreduce", "all_gather": "allgather", "reduce_scatter": "reducescatter"}
)
_MODES = ("auto", "size", "index", "optimal")
_KIND_KEYS = ("mode", "config")


@dataclass(frozen=True)
class KindFusion:
    """How the collectives of one kind are fused."""

    mode: str = "auto"
    """One of "auto", "size", "index" and "optimal"."""
    config: Any = None
    """auto: None; size: the threshold in MiB; index: the cuts, ascending sequence numbers; optimal: None or what
    `cluster=` takes, which it then stands in for."""

    @property
    def threshold_bytes(self) -> int | None:
        """Largest fused payload in bytes; None in the modes "index" and "optimal", which have no threshold."""
        if self.mode == "auto":
            return AUTO_THRESHOLD_MIB * MIB
        return self.config * MIB if self.mode == "size" else None

    @property
    def cuts(self) -> tuple[int, ...] | None:
        """Sequence numbers that begin a new fused collective; None unless the mode is "index"."""
        return self.config if self.mode == "index" else None

    def as_dict(self) -> dict[str, Any]:
        """The user form: {"mode": ..., "config": ...}, cuts as a list."""
        return {"mode": self.mode, "config": self.config if self.cuts is None else list(self.cuts)}


@dataclass(frozen=True)
class FusionConfig:
    """A whole, valid `comm_fusion`; `parse` makes one from what a user gives."""

    openstate: bool = True
    """False turns all fusion off, whatever the kinds say."""
    allreduce: KindFusion = KindFusion()
    allgather: KindFusion = KindFusion()
    reducescatter: KindFusion = KindFusion()
    is_given: bool = field(default=False, compare=False)
    """Whether the user has said anything, so that plans keep to it."""

    @classmethod
    def parse(cls, value: object) -> FusionConfig:
        """The configuration a user's `comm_fusion` stands for; what it leaves out is default, and None is all
        default. A FusionConfig is returned as it is. Raises as `updated` does."""
        if isinstance(value, FusionConfig):
            return value
        return cls() if value is None else cls().updated(value)

    def updated(self, value: object) -> FusionConfig:
        """This configuration with `openstate` and the kinds that the user's dict `value` gives put in place.

        Raises ConfigTypeError, ConfigKeyError or ConfigValueError; the message names the
        entry, its value and the fix. What is raised does not depend on the order of keys.
        """
        given = _check_containers(value)
        _check_kinds(given)
        kinds = [kind for kind in KINDS if kind in given]
        for check in (_check_keys, _check_mode, _check_config_type, _check_config_value):
            for kind in kinds:
                check(kind, given[kind])
        changes: dict[str, Any] = {kind: _kind_fusion(**given[kind]) for kind in kinds}
        return replace(self, openstate=given.get("openstate", self.openstate), is_given=True, **changes)

    def as_dict(self) -> dict[str, Any]:
        """The full dict in the form that `parse` reads; a fresh copy."""
        return {"openstate": self.openstate, **{kind: self._kind(kind).as_dict() for kind in KINDS}}

    def for_kind(self, op: str) -> KindFusion:
        """The part for collectives of kind `op`: "all_reduce", "all_gather" or "reduce_scatter".

        Raises ConfigKeyError for any other kind.
        """
        if op not in _KIND_OF_OP:
            raise ConfigKeyError(f"kind {show(op)} has no fusion options; use one of {_quoted(_KIND_OF_OP)}")
        return self._kind(_KIND_OF_OP[op])

    @property
    def optimal_cluster(self) -> Any:
        """The cluster that mode "optimal" was given, of the first kind that has one; else None."""
        given = [fusion.config for fusion in map(self._kind, KINDS) if fusion.mode == "optimal"]
        return next((config for config in given if config is not None), None)

    @property
    def is_optimal(self) -> bool:
        """Whether any kind is fused by predicted step time."""
        return self.openstate and any(self._kind(kind).mode == "optimal" for kind in KINDS)

    def in_place_of_optimal(self, rule: KindFusion) -> FusionConfig:
        """This configuration with another rule for the kinds in mode "optimal"."""
        changes: dict[str, Any] = {kind: rule for kind in KINDS if self._kind(kind).mode == "optimal"}
        return replace(self, **changes)

    def _kind(self, kind: str) -> KindFusion:
        fusion: KindFusion = getattr(self, kind)
        return fusion


def check_cuts(value: object, where: str) -> tuple[int, ...]:
    """The cuts of mode "index" from a user's list. Raises ConfigTypeError or ConfigValueError."""
    cuts = _check_cuts_type(value, where)
    _check_cuts_value(cuts, where)
    return tuple(cuts)


def _kind_fusion(mode: str, config: Any) -> KindFusion:
    return KindFusion(mode, tuple(config) if isinstance(config, list) else config)


def _at(*keys: object) -> str:
    """How a user writes the entry of `comm_fusion` under these keys."""
    return "comm_fusion" + "".join(f'["{key}"]' if isinstance(key, str) else f"[{key!r}]" for key in keys)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _modes_for(kind: str) -> tuple[str, ...]:
    return ("auto", "size", "index", "optimal") if kind == "allreduce" else ("auto", "size", "optimal")


def _check_containers(value: object) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ConfigTypeError(
            f"{_at()} is {show(value)}; give a dict such as "
            '{"allreduce": {"mode": "size", "config": 32}}, or None for the default'
        )
    check_bool(value.get("openstate", True), _at("openstate"))
    for kind in KINDS:
        if kind in value and not isinstance(value[kind], dict):
            raise ConfigTypeError(
                f'{_at(kind)} is {show(value[kind])}; give a dict such as {{"mode": "auto", "config": None}}'
            )
    return value


def _check_kinds(given: dict[Any, Any]) -> None:
    for key, value in given.items():
        if key not in (*KINDS, "openstate"):
            raise ConfigKeyError(
                f"{_at(key)} is {show(value)}, but {show(key)} is not a kind; "
                f"use {_quoted(KINDS)}, or the switch {_quoted(['openstate'])}"
            )


def _check_keys(kind: str, entry: dict[Any, Any]) -> None:
    for key in _KIND_KEYS:
        if key not in entry:
            raise ConfigKeyError(
                f'{_at(kind)} is {show(entry)} and lacks "{key}"; give both "mode" and "config", '
                'such as {"mode": "auto", "config": None}'
            )
    for key, value in entry.items():
        if key not in _KIND_KEYS:
            raise ConfigKeyError(
                f'{_at(kind, key)} is {show(value)}, but a kind has only "mode" and "config"; remove {show(key)}'
            )


def _check_mode(kind: str, entry: dict[str, Any]) -> None:
    mode, where, usable = entry["mode"], _at(kind, "mode"), _quoted(_modes_for(kind))
    if not isinstance(mode, str) or mode not in _MODES:
        raise ConfigKeyError(f"{where} is {show(mode)}, which is not a mode; use one of {usable}")
    if mode not in _modes_for(kind):
        raise ConfigKeyError(f'{where} is "{mode}", which only "allreduce" has; use one of {usable}')


def _check_config_type(kind: str, entry: dict[str, Any]) -> None:
    mode, config, where = entry["mode"], entry["config"], _at(kind, "config")
    if mode == "size" and not is_int(config):
        raise ConfigTypeError(f'{where} is {show(config)}; with mode "size" give the threshold in MiB, an int > 0')
    if mode == "index":
        _check_cuts_type(config, where)
    if mode == "optimal" and config is not None:
        resolve_costs(config, where)


def _check_config_value(kind: str, entry: dict[str, Any]) -> None:
    mode, config, where = entry["mode"], entry["config"], _at(kind, "config")
    if mode == "auto" and config is not None:
        raise ConfigValueError(
            f'{where} is {show(config)}; with mode "auto" give None, or use another mode: '
            f"{_quoted(_modes_for(kind)[1:])}"
        )
    if mode == "size" and config <= 0:
        raise ConfigValueError(f'{where} is {config}; with mode "size" give the threshold in MiB, an int > 0')
    if mode == "index":
        _check_cuts_value(config, where)


def _check_cuts_type(value: object, where: str) -> list[int]:
    if not isinstance(value, list) or not all(is_int(cut) for cut in value):
        raise ConfigTypeError(f"{where} is {show(value)}; give a list of ints such as [20, 35]")
    return value


def _check_cuts_value(cuts: list[int], where: str) -> None:
    if not cuts:
        problem = "is empty"
    elif min(cuts) <= 0:
        problem = "has a cut that is not greater than 0"
    elif len(set(cuts)) < len(cuts):
        problem = "has duplicates"
    elif sorted(cuts) != cuts:
        problem = "is not ascending"
    else:
        return
    raise ConfigValueError(f"{where} is {show(cuts)}, which {problem}; give ascending ints > 0 such as [20, 35]")
