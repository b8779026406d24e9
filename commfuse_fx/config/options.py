"""The options of `compile`, each by itself: its default and the check that a value given for it passes."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar, cast

from commfuse_fx.config.parallel_optimizer import ParallelOptimizer
from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.machine.source import resolve_costs
from commfuse_fx.support.checks import check_bool, check_choice, check_int, is_int, show
from commfuse_fx.support.documents import is_path

Value = TypeVar("Value")

MAX_DEVICES = 4096
"""Largest `device_num`."""

PARALLEL_MODES = ("stand_alone", "data_parallel", "hybrid_parallel", "semi_auto", "auto")
PARALLEL_MODE_ALIASES: Mapping[str, str] = MappingProxyType(
    {"semi_auto_parallel": "semi_auto", "auto_parallel": "auto"}
)
SEARCH_MODES = ("dynamic_programming", "recursive_programming", "sharding_propagation")
SCHEDULES = ("overlap", "none", "auto")
CAPTURES = ("trace", "dynamo")
BACKENDS = ("eager", "inductor")
REGIONS = ("stretches", "layers")
MEASURED, PRESETS = "measured", "default"
"""The words of `cluster=` for figures that a step measures while it trains, and for those that are assumed."""
EXCHANGE_FACTORS = ("never", "auto", "always")

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "comm_fusion": None,
        "has_aux": False,
        "return_loss": True,
        "parallel_mode": "data_parallel",
        "mesh": None,
        "device_num": None,
        "global_rank": None,
        "gradients_mean": True,
        "gradient_fp32_sync": True,
        "enable_parallel_optimizer": False,
        "parallel_optimizer_config": None,
        "search_mode": "dynamic_programming",
        "strategy_ckpt_load_file": None,
        "strategy_ckpt_load_strict": False,
        "strategy_ckpt_save_file": None,
        "full_batch": False,
        "parameter_broadcast": False,
        "broadcast_buffers": False,
        "find_unused_parameters": False,
        "capture": "trace",
        "pipeline_stages": 1,
        "accumulate_steps": 1,
        "clip_grad_norm": None,
        "schedule": "overlap",
        "replan": True,
        "memory_limit": None,
        "backend": "eager",
        "inductor_regions": "stretches",
        "cuda_graph": "auto",
        "cpu_kernels": True,
        "skip_passes": (),
        "cluster": None,
        "exchange_factors": "never",
        "gradient_compression": None,
    }
)
"""Option name -> default value, in the order of the signature of `compile`."""


DEFAULTS_OF_MODULE: Mapping[str, Any] = MappingProxyType(
    {"parameter_broadcast": True, "broadcast_buffers": True, "cuda_graph": False}
)
"""What the module form has in their place: the defaults of DistributedDataParallel, which captures no graph."""


@dataclass(frozen=True, repr=False)
class Default:
    """A default in a signature, told apart from the same value given by the caller; prints as the value."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


def not_given(value: Value) -> Value:
    """A Default that type checkers take for the value that it stands for."""
    return cast(Value, Default(value))


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The options of a schedule.

    `ScheduleConfig()` is the same as `schedule="overlap"`, and `ScheduleConfig(mode="auto")` as `schedule="auto"`.

    Raises ConfigTypeError or ConfigValueError, which name the field.
    """

    memory_limit: int | None = None
    """Hard cap in bytes on the step's peak memory as the compiler predicts it (parameters, optimizer state, gradients,
    activations; not the caches of the allocator), or None."""
    across_steps: bool | None = None
    """Whether communication may run on into the next step: the call then returns before the last updates, and reading a
    parameter or the optimizer's state waits for them. None: with "overlap" no, with "auto" where it measures faster."""
    mode: str = field(default="overlap", repr=False)
    """"overlap", or "auto"."""

    def __post_init__(self) -> None:
        _check_memory_limit(self.memory_limit, "ScheduleConfig.memory_limit")
        check_choice(self.mode, "ScheduleConfig.mode", ("overlap", "auto"))
        if self.across_steps is not None:
            check_bool(self.across_steps, "ScheduleConfig.across_steps")
        elif self.mode == "overlap":
            object.__setattr__(self, "across_steps", False)


def limited(schedule: str | ScheduleConfig, limit: int | None) -> str | ScheduleConfig:
    """The schedule with `compile`'s memory_limit. Raises ConfigValueError for one that has none, or another."""
    if limit is None:
        return schedule
    if schedule == "none":
        raise ConfigValueError(
            f'memory_limit={limit} with schedule="none", which plans nothing: leave one of them out, or use '
            'schedule="overlap"'
        )
    if not isinstance(schedule, ScheduleConfig):
        return ScheduleConfig(mode=schedule, memory_limit=limit)
    if schedule.memory_limit not in (None, limit):
        raise ConfigValueError(
            f"memory_limit={limit} and schedule=ScheduleConfig(memory_limit={schedule.memory_limit}): give one of them"
        )
    return replace(schedule, memory_limit=limit)


@dataclass(frozen=True, kw_only=True)
class TrialLimits:
    """What measuring and trying plans may take, in place of `replan=True`, which stands for `TrialLimits()`.

    Raises ConfigTypeError or ConfigValueError, which name the field.
    """

    seconds: float = 30.0
    """Seconds that all of it may take longer than training with the default plan. 30 are 5% of ten minutes. Below 2,
    which measuring the network takes, nothing is measured, and the default plan stays."""
    steps: int = 2000
    """Training steps after which it ends, counted from where measuring begins."""

    def __post_init__(self) -> None:
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, (int, float)):
            raise ConfigTypeError(f"TrialLimits.seconds is {show(self.seconds)}; give a number of seconds")
        if not 0 < self.seconds < math.inf:
            raise ConfigValueError(f"TrialLimits.seconds is {show(self.seconds)}; give a finite number above 0")
        check_int(self.steps, "TrialLimits.steps", 1)


def validated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings (option name -> value, all but comm_fusion), checked each by itself and together.

    A mesh given as a list comes back as a tuple, and a cluster as what it stands for; everything else comes back as
    it was given.
    Raises ConfigTypeError or ConfigValueError.
    """
    checked = {name: _CHECKS[name](value, name) for name, value in settings.items()}
    device_num, global_rank, mesh = (checked.get(name) for name in ("device_num", "global_rank", "mesh"))
    if global_rank is not None:
        if device_num is None:
            check_int(global_rank, "global_rank", 0, MAX_DEVICES - 1)
        else:
            limit = f" (device_num is {device_num})"
            check_int(global_rank, "global_rank", 0, device_num - 1, limit)
    if device_num is not None and isinstance(mesh, tuple) and math.prod(mesh) != device_num:
        raise ConfigValueError(
            f"mesh is {mesh}, which holds {math.prod(mesh)} devices, but device_num is {device_num}; "
            "give sizes whose product is device_num"
        )
    return checked


def _check_device_num(value: object, where: str) -> int | None:
    return None if value is None else check_int(value, where, 1, MAX_DEVICES)


def _check_global_rank(value: object, where: str) -> int | None:
    if value is not None and not is_int(value):
        raise ConfigTypeError(f"{where} is {show(value)}; give an int in 0..device_num-1")
    return value


def _check_mesh(value: object, where: str) -> object:
    if isinstance(value, (tuple, list)):
        if not value:
            raise ConfigValueError(f"{where} is {value}; give at least one size, or None for one axis")
        return tuple(check_int(size, f"{where}[{axis}] of {value}", 1) for axis, size in enumerate(value))
    if value is None or hasattr(value, "mesh_dim_names"):
        return value
    raise ConfigTypeError(f"{where} is {show(value)}; give a DeviceMesh, a tuple of sizes such as (2, 4), or None")


def _check_bool_or_default(value: object, where: str) -> bool:
    """None stands for the default, False: it is the default of every step."""
    return False if value is None else check_bool(value, where)


def _check_schedule(value: object, where: str) -> str | ScheduleConfig:
    return value if isinstance(value, ScheduleConfig) else check_choice(value, where, SCHEDULES)


def _check_memory_limit(value: object, where: str) -> int | None:
    return None if value is None else check_int(value, where, 1, limit=" (bytes), or None")


def _check_cuda_graph(value: object, where: str) -> object:
    if isinstance(value, bool) or value == "auto":
        return value
    error = ConfigValueError if isinstance(value, str) else ConfigTypeError
    raise error(f'{where} is {show(value)}; give "auto", True or False')


def _check_path(value: object, where: str) -> object:
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise ConfigTypeError(f"{where} is {show(value)}; give a path or None")
    return value


def _check_parallel_optimizer_config(value: object, where: str) -> object:
    """The dictionary as it was given."""
    ParallelOptimizer.parse(value, where)
    return value


def _check_cluster(value: object, where: str) -> object:
    """What `cluster=` stands for: figures, or one of the words; None where nothing is given."""
    if value is None or (isinstance(value, str) and value in (MEASURED, PRESETS)):
        return value
    try:
        return resolve_costs(value, where)
    except ConfigValueError as error:
        if isinstance(value, str) and not is_path(value):
            raise ConfigValueError(f'{error}; or "{MEASURED}" or "{PRESETS}"') from None
        raise


def _check_replan(value: object, where: str) -> bool | TrialLimits:
    if isinstance(value, (bool, TrialLimits)):
        return value
    raise ConfigTypeError(
        f"{where} is {show(value)}; give True, False or a TrialLimits such as TrialLimits(seconds=10)"
    )


def _check_clip_grad_norm(value: object, where: str) -> float | None:
    if value is None:
        return None
    fix = "give a number above 0, the largest norm that all gradients together may have, or None"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigTypeError(f"{where} is {show(value)}; {fix}")
    if not 0 < value <= sys.float_info.max:
        raise ConfigValueError(f"{where} is {show(value)}; {fix}")
    return float(value)


def _check_skip_passes(value: object, where: str) -> tuple[str, ...]:
    """The names, each once and sorted."""
    if isinstance(value, str) or not isinstance(value, (tuple, list)):
        raise ConfigTypeError(f'{where} is {show(value)}; give a tuple of names of passes, such as ("overlap",)')
    for name in value:
        if not isinstance(name, str):
            raise ConfigTypeError(f'{where} holds {show(name)}; give names of passes, such as "overlap"')
    return tuple(sorted(dict.fromkeys(value)))


def _accept(value: object, where: str) -> object:
    return value


_CHECKS: Mapping[str, Callable[[Any, str], Any]] = MappingProxyType(
    {
        "parallel_mode": partial(check_choice, choices=(*PARALLEL_MODES, *PARALLEL_MODE_ALIASES)),
        "has_aux": check_bool,
        "return_loss": check_bool,
        "mesh": _check_mesh,
        "device_num": _check_device_num,
        "global_rank": _check_global_rank,
        "gradients_mean": check_bool,
        "gradient_fp32_sync": check_bool,
        "enable_parallel_optimizer": check_bool,
        "parallel_optimizer_config": _check_parallel_optimizer_config,
        "search_mode": partial(check_choice, choices=SEARCH_MODES),
        "strategy_ckpt_load_file": _check_path,
        "strategy_ckpt_load_strict": check_bool,
        "strategy_ckpt_save_file": _check_path,
        "full_batch": check_bool,
        "parameter_broadcast": check_bool,
        "broadcast_buffers": _check_bool_or_default,
        "find_unused_parameters": check_bool,
        "capture": partial(check_choice, choices=CAPTURES),
        "pipeline_stages": partial(check_int, low=1),
        "accumulate_steps": partial(check_int, low=1),
        "clip_grad_norm": _check_clip_grad_norm,
        "schedule": _check_schedule,
        "replan": _check_replan,
        "memory_limit": _check_memory_limit,
        "backend": partial(check_choice, choices=BACKENDS),
        "inductor_regions": partial(check_choice, choices=REGIONS),
        "cuda_graph": _check_cuda_graph,
        "cpu_kernels": check_bool,
        "skip_passes": _check_skip_passes,
        "cluster": _check_cluster,
        "exchange_factors": partial(check_choice, choices=EXCHANGE_FACTORS),
        "gradient_compression": _accept,
    }
)
