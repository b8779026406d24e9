"""The configuration of a compile as plain data.

What belongs to the session and not to the graph is left out: mesh, size and rank of the world (a program has its own
mesh), and the files of a strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.config.fusion_config import KINDS, FusionConfig
from commfuse_fx.config.options import DEFAULTS, ScheduleConfig
from commfuse_fx.errors import CommFuseError, ConfigValueError
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.machine.source import Costs
from commfuse_fx.machine.step_profile import StepProfile
from commfuse_fx.support.checks import show
from commfuse_fx.support.documents import document_data, document_of_data

_OF_THE_SESSION = (
    "mesh",
    "device_num",
    "global_rank",
    "strategy_ckpt_load_file",
    "strategy_ckpt_load_strict",
    "strategy_ckpt_save_file",
    "replan",
)
_OF_THE_SCHEDULE = "memory_limit"
_SAVED = tuple(name for name in DEFAULTS if name not in (*_OF_THE_SESSION, _OF_THE_SCHEDULE))
_OBJECTS = ("comm_fusion", "schedule", "cluster")


def config_to_dict(config: CompileConfig) -> dict[str, Any]:
    """Every saved option by its name; a cluster or a profile as the document it is kept in."""
    plain = {name: getattr(config, name) for name in _SAVED if name not in _OBJECTS}
    plain["skip_passes"] = list(config.skip_passes)
    schedule = config.schedule
    return {
        "comm_fusion": fusion_to_dict(config.comm_fusion),
        **plain,
        "schedule": _plain(schedule) if isinstance(schedule, ScheduleConfig) else schedule,
        "cluster": None if config.cluster is None else document_data(config.cluster),
    }


def config_from_dict(data: Mapping[str, Any], where: str) -> CompileConfig:
    """What `config_to_dict` wrote, for no session: no world is given.

    Raises ConfigValueError, which names `where`, the option and its value.
    """
    for name in _SAVED:
        if name not in data:
            raise ConfigValueError(f'{where}: "{name}" is missing; write the dump again')
    for name in data:
        if name not in _SAVED:
            raise ConfigValueError(f"{where}: {show(name)} is no option that is saved; write the dump again")
    try:
        settings = dict(data)
        settings["comm_fusion"] = fusion_from_dict(data["comm_fusion"], f"{where}.comm_fusion")
        settings["schedule"] = _schedule(data["schedule"])
        settings["cluster"] = _costs(data["cluster"], f"{where}.cluster")
        return CompileConfig.resolve({**settings, **{name: DEFAULTS[name] for name in _OF_THE_SESSION}})
    except CommFuseError as error:
        raise ConfigValueError(f"{where}: {error}; write the dump again") from None


def fusion_to_dict(fusion: FusionConfig) -> dict[str, Any]:
    """The user form, but for the cluster of mode "optimal", which is the cluster of the configuration by now."""
    found = fusion.as_dict()
    for kind in KINDS:
        if found[kind]["mode"] == "optimal":
            found[kind] = {"mode": "optimal", "config": None}
    return found


def fusion_from_dict(data: Any, where: str) -> FusionConfig:
    """The inverse of `fusion_to_dict`. Raises ConfigTypeError, ConfigKeyError or ConfigValueError."""
    for kind in KINDS:
        given = data.get(kind) if isinstance(data, dict) else None
        if isinstance(given, dict) and given.get("mode") == "optimal" and given.get("config") is not None:
            raise ConfigValueError(f'{where}.{kind}: mode "optimal" has a config; a file says null there')
    return FusionConfig.parse({} if data is None else data)


def _plain(schedule: ScheduleConfig) -> dict[str, Any]:
    """The options of a schedule that runs; what finds one is not saved."""
    return {"memory_limit": schedule.memory_limit, "across_steps": schedule.across_steps}


def _schedule(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    unknown = next((key for key in data if key not in ("memory_limit", "across_steps")), None)
    if unknown is not None:
        raise ConfigValueError(f"schedule has the unknown key {show(unknown)}")
    return ScheduleConfig(**data)


def _costs(data: Any, where: str) -> Costs | None:
    # Never a name or a path, which `cluster=` takes as well: a file does not make us read another one.
    if data is None:
        return None
    if not isinstance(data, dict) or data.get("kind") not in ("cluster", "profile"):
        raise ConfigValueError(f'{where} is neither null nor an object of kind "cluster" or "profile"')
    if data["kind"] == "cluster":
        return document_of_data(ClusterSpec, data, where)
    return document_of_data(StepProfile, data, where)
