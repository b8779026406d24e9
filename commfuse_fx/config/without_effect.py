"""What becomes of options without effect: an error, a warning, or a line of `explain()`.

Why: docs/decisions.md, "An option without effect is an error where memory or numbers are not what was asked".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from commfuse_fx.config.compile_config import CompileConfig, WithoutEffect
from commfuse_fx.config.context import context_settings
from commfuse_fx.config.fusion_config import KindFusion
from commfuse_fx.config.options import DEFAULTS, Default, ScheduleConfig
from commfuse_fx.config.uses import WHERE, Use
from commfuse_fx.config.where_options_count import ERROR, LISTED, TABLE, WARNING, Idle
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.support.checks import show
from commfuse_fx.support.logs import logger

_LOG = logger("plan")
_SHARING, _FUSION, _SCHEDULE, _LIMIT = "parallel_optimizer_config", "comm_fusion", "schedule", "memory_limit"
_CUTS = "comm_fusion.index"


def settled(config: CompileConfig, given: Mapping[str, Any], form: str, has_optimizer: bool) -> CompileConfig:
    """The configuration without what has no effect, and with a list of that.

    config: what `CompileConfig.resolve` has made of the options `given` and of the context. What the context holds is
        for all that is compiled, so that it is listed only.

    Raises ConfigValueError for an option of the call itself where memory, numbers or results would not be as asked.
    """
    own = {name: value for name, value in given.items() if not isinstance(value, Default)}
    if own.get(_FUSION, ...) is None:
        del own[_FUSION]
    of_context = context_settings()
    found: list[WithoutEffect] = []
    for option, row in TABLE.items():
        name, is_own = _argument(option), _argument(option) in own or (option == _LIMIT and _SCHEDULE in own)
        value = own.get(name) if option == "cluster" else _value(config, option)
        if not (row.asks(value) and (is_own or name in of_context)):
            continue
        use = Use(config, form, has_optimizer, own)
        idle = next((each for each in row.idle if WHERE[each.where][0](use)), None)
        if idle is None:
            continue
        label, reason = f"{_named(option)}={_shown(option, value)}", _reason(use, option, value, idle)
        if is_own and idle.then == ERROR:
            raise ConfigValueError(f"{label} {reason}")
        origin = "" if is_own else "; the context has set it"
        found.append(WithoutEffect(label, reason + origin, is_own and idle.then == WARNING))
        if not (idle.stays or idle.then == LISTED):
            config = _without(config, option)
    return replace(config, without_effect=tuple(found))


def warn_of_options(config: CompileConfig) -> None:
    """Warn of the options that were given and have no effect."""
    for each in config.without_effect:
        if each.warns:
            _LOG.warning("%s has no effect %s", each.option, each.reason)


def _argument(option: str) -> str:
    """The argument of `compile` that a row of the table is about."""
    return option.partition(".")[0]


def _value(config: CompileConfig, option: str) -> Any:
    """The value of an option, or of a field; None where the field is left out."""
    argument, _, key = option.partition(".")
    if argument == _SHARING:
        return (config.parallel_optimizer_config or {}).get(key)
    if option == "comm_fusion.optimal":
        return config.comm_fusion.is_optimal
    if option == _CUTS:
        return config.comm_fusion.allreduce.cuts
    if argument == _FUSION:
        return getattr(config.comm_fusion, key)
    if option == "schedule.mode":
        return "auto" if config.is_auto else None
    return config.across_steps if key == "across_steps" else getattr(config, option)


def _without(config: CompileConfig, option: str) -> CompileConfig:
    """The configuration as if the option had not been given."""
    argument, _, key = option.partition(".")
    if argument == _SHARING:
        left = {name: value for name, value in (config.parallel_optimizer_config or {}).items() if name != key}
        return replace(config, parallel_optimizer_config=left or None)
    if argument == _SCHEDULE:
        limit, across = config.memory_limit, key == "mode" and config.across_steps
        plain = limit is None and not across
        return replace(config, schedule="overlap" if plain else ScheduleConfig(memory_limit=limit, across_steps=across))
    if option == _CUTS:
        return replace(config, comm_fusion=replace(config.comm_fusion, allreduce=KindFusion()))
    changed: dict[str, Any] = {option: DEFAULTS[option]}
    return replace(config, **changed)


def _named(option: str) -> str:
    """The option or the field, as its user writes it."""
    argument, _, key = option.partition(".")
    if argument in (_SHARING, _FUSION) and key not in ("", "optimal", "index"):
        return f'{argument}["{key}"]'
    return key if key == "across_steps" else argument


def _shown(option: str, value: Any) -> str:
    if isinstance(value, KindFusion):
        return show(value.as_dict())
    if option == _CUTS:
        return show({"allreduce": {"mode": "index", "config": list(value)}})
    return '{"mode": "optimal", ...}' if option == "comm_fusion.optimal" else show(value)


def _reason(use: Use, option: str, value: Any, idle: Idle) -> str:
    words = {
        "option": _named(option),
        "value": value,
        "mode": use.mode,
        "level": use.sharing.level,
        "device_num": use.config.device_num,
    }
    return f"{WHERE[idle.where][1]}: {idle.why}; {idle.fix}".format(**words)
