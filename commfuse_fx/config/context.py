"""The process-wide context: defaults that `compile` takes up for the arguments it is not given."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, overload

from typing_extensions import Unpack

from commfuse_fx.config.fusion_config import FusionConfig, KindFusion, check_cuts
from commfuse_fx.config.option_types import (
    AnyPath,
    ContextSettings,
    FusionOptions,
    Number,
    ParallelOptimizerOptions,
    Switch,
)
from commfuse_fx.config.options import DEFAULTS, validated
from commfuse_fx.errors import ConfigKeyError, ConfigValueError
from commfuse_fx.support.checks import alternatives, show
from commfuse_fx.support.tracebacks import user_frames_only
from commfuse_fx.support.warned import forget_given_warnings

CONTEXT_NAMES = (
    "device_num",
    "global_rank",
    "gradients_mean",
    "parallel_mode",
    "all_reduce_fusion_config",
    "enable_parallel_optimizer",
    "parallel_optimizer_config",
    "parameter_broadcast",
    "comm_fusion",
    "gradient_fp32_sync",
    "search_mode",
    "strategy_ckpt_load_file",
    "strategy_ckpt_load_strict",
    "strategy_ckpt_save_file",
    "full_batch",
    "pipeline_stages",
)
"""What the context holds. All but all_reduce_fusion_config are options of `compile`."""

_FUSION_NAMES = ("comm_fusion", "all_reduce_fusion_config")

# Option name -> value as it was set; comm_fusion is a FusionConfig and holds all_reduce_fusion_config too.
_settings: dict[str, Any] = {}


@user_frames_only
def set_auto_parallel_context(**settings: Unpack[ContextSettings]) -> None:
    """Set defaults for the calls of `compile` that follow. A call that fails changes nothing.

    `comm_fusion` is merged into what is set: `openstate` and the kinds that it gives are replaced, and None
    goes back to the default. `all_reduce_fusion_config=[20, 35]` sets the kind "allreduce" to mode "index";
    None removes such cuts. None for `device_num` or `global_rank` unsets it.

    Raises ConfigKeyError for an unknown name, ConfigTypeError or ConfigValueError for a value that `compile`
    would not take. A valid value that is not available yet is kept, and `compile` reports it.
    """
    for name in settings:
        _check_name(name)
    plain = _plain(settings)
    validated({**_plain(_settings), **plain})
    changes = copy.deepcopy(plain)
    if len(plain) < len(settings):
        changes["comm_fusion"] = _merged_fusion(_fusion(), settings)
    _settings.update(changes)


@overload
def get_auto_parallel_context(name: Switch) -> bool: ...
@overload
def get_auto_parallel_context(name: Number) -> int: ...
@overload
def get_auto_parallel_context(name: Literal["parallel_mode", "search_mode"]) -> str: ...
@overload
def get_auto_parallel_context(name: Literal["all_reduce_fusion_config"]) -> list[int] | None: ...
@overload
def get_auto_parallel_context(name: Literal["comm_fusion"]) -> FusionOptions: ...
@overload
def get_auto_parallel_context(name: Literal["parallel_optimizer_config"]) -> ParallelOptimizerOptions | None: ...
@overload
def get_auto_parallel_context(
    name: Literal["strategy_ckpt_load_file", "strategy_ckpt_save_file"],
) -> AnyPath | None: ...
@overload
def get_auto_parallel_context(name: str) -> object: ...


@user_frames_only
def get_auto_parallel_context(name: str) -> object:
    """The value of one default, as it was set or as it is by itself.

    "comm_fusion" gives the full merged dict, "all_reduce_fusion_config" the list of cuts or None, and
    "device_num" and "global_rank" give 0 when they are not set. Changing what is returned does not change the
    context. Raises ConfigKeyError for an unknown name.
    """
    _check_name(name)
    if name == "comm_fusion":
        return _fusion().as_dict()
    if name == "all_reduce_fusion_config":
        cuts = _fusion().allreduce.cuts
        return None if cuts is None else list(cuts)
    value = _settings.get(name, DEFAULTS[name])
    if value is None and name in ("device_num", "global_rank"):
        return 0
    return copy.deepcopy(value)


def reset_auto_parallel_context() -> None:
    """Unset all defaults. A warning that has been given may be given again."""
    _settings.clear()
    forget_given_warnings()


def context_settings() -> dict[str, Any]:
    """The options that are set, by name; comm_fusion as a FusionConfig."""
    return copy.deepcopy(_settings)


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in _FUSION_NAMES}


def _fusion() -> FusionConfig:
    return FusionConfig.parse(_settings.get("comm_fusion"))


def _check_name(name: object) -> None:
    if name not in CONTEXT_NAMES:
        raise ConfigKeyError(f"{show(name)} is not a context setting{alternatives(name, CONTEXT_NAMES)}")


def _merged_fusion(fusion: FusionConfig, settings: Mapping[str, Any]) -> FusionConfig:
    """`fusion` with the `comm_fusion` and `all_reduce_fusion_config` of one call put in place."""
    given = settings.get("comm_fusion")
    if isinstance(given, dict):
        fusion = fusion.updated(given)
    elif "comm_fusion" in settings:
        fusion = FusionConfig.parse(given)
    if "all_reduce_fusion_config" not in settings:
        return fusion

    cuts = settings["all_reduce_fusion_config"]
    if cuts is not None:
        cuts = check_cuts(cuts, "all_reduce_fusion_config")
    if cuts == fusion.allreduce.cuts:
        return fusion
    if isinstance(given, FusionConfig) or (isinstance(given, dict) and "allreduce" in given):
        raise ConfigValueError(
            f"all_reduce_fusion_config is {show(settings['all_reduce_fusion_config'])}, but "
            f'comm_fusion["allreduce"] is {show(fusion.allreduce.as_dict())} in the same call; '
            "give one of the two"
        )
    return replace(fusion, allreduce=KindFusion() if cuts is None else KindFusion("index", cuts))
