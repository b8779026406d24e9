"""Options that have no effect on a case: `compile` says so, and the case goes on as without them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import commfuse_fx as cf
from tests.property.random_cases import Case

LOGGER = logging.getLogger("commfuse_fx")


@dataclass(frozen=True)
class Idle:
    """options: the last of which has no effect. is_error: whether `compile` refuses it; else it warns."""

    options: dict[str, Any]
    is_error: bool
    fits: Callable[[Case], bool]


def _is_step(case: Case) -> bool:
    return not case.kind.startswith("module")


def _is_whole(case: Case) -> bool:
    return _is_step(case) and not case.marks


def _is_module(case: Case) -> bool:
    return case.kind.startswith("module")


def _is_alone(case: Case) -> bool:
    return case.kind == "one"


def _is_not_searched(case: Case) -> bool:
    return not case.kind.startswith("divided")


ALONE = {"parallel_mode": "stand_alone"}

IDLE: dict[str, Idle] = {
    "search": Idle({"search_mode": "recursive_programming"}, False, _is_not_searched),
    "file to write": Idle({"strategy_ckpt_save_file": "found.json"}, False, _is_not_searched),
    "file to read": Idle({"strategy_ckpt_load_file": "found.json"}, True, _is_not_searched),
    "regions": Idle({"inductor_regions": "layers"}, False, lambda case: not case.regions),
    "unused": Idle({"find_unused_parameters": True}, False, _is_step),
    "level": Idle({"parallel_optimizer_config": {"level": 3}}, True, _is_whole),
    "pad": Idle({"parallel_optimizer_config": {"pad": True}}, True, _is_whole),
    "micro-batches": Idle({"accumulate_steps": 2}, True, lambda case: _is_module(case) or case.accumulate),
    "a sum": Idle({"gradients_mean": False}, True, lambda case: bool(case.marks)),
    "buffers": Idle({"broadcast_buffers": True}, True, lambda case: bool(case.marks)),
    "limits": Idle({"replan": cf.TrialLimits(steps=5)}, False, lambda case: _is_alone(case) and case.fusion == "off"),
    "a sum of one": Idle({**ALONE, "gradients_mean": False}, False, _is_alone),
    "rows of one": Idle({**ALONE, "full_batch": True}, False, _is_alone),
    "values of one": Idle({**ALONE, "parameter_broadcast": True}, True, _is_alone),
    "auxiliary": Idle({"has_aux": True}, True, _is_module),
    "loss": Idle({"return_loss": False}, True, _is_module),
    "whole batch": Idle({"full_batch": True}, True, _is_module),
    "parallel optimizer": Idle({"enable_parallel_optimizer": True}, True, _is_module),
    "across": Idle(
        {"schedule": cf.ScheduleConfig(across_steps=True)},
        False,
        lambda case: _is_module(case) and case.fusion in ("default", "size", "index"),
    ),
    "memory": Idle({"memory_limit": 1 << 30}, True, lambda case: case.kind == "module_ranks"),
}
"""Name -> what does nothing in a case that it fits."""


class NotSaid(AssertionError):
    """`compile` has not said that an option has no effect."""


def compiled_with_idle(case: Case, model: Any, **options: Any) -> Any:
    """What `compile` makes of the options, and of those that have no effect if it only warns."""
    fitting = [name for name in IDLE if IDLE[name].fits(case)]
    if case.idle < 0 or not fitting:
        return cf.compile(model, **options)
    name = fitting[case.idle % len(fitting)]
    idle = IDLE[name]
    option = next(reversed(idle.options))
    if not idle.is_error:
        with messages() as found:
            compiled = cf.compile(model, **{**options, **idle.options})
        label = "across_steps" if option == "schedule" else option
        said = [text for text in found if text.startswith(f"{label}=") and "has no effect" in text]
        if len(said) != 1:
            raise NotSaid(f"{name}: {option} warns {len(said)} times: {found}")
        return compiled
    try:
        cf.compile(model, **{**options, **idle.options})
    except cf.ConfigValueError as error:
        if not re.match(rf"{option}\b.*=", str(error)):
            raise NotSaid(f"{name}: the error is not of {option}: {error}") from error
    else:
        raise NotSaid(f"{name}: {option} is taken")
    return cf.compile(model, **options)


@contextmanager
def messages() -> Iterator[list[str]]:
    """What the package logs meanwhile, without the rank in front."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(re.sub(r"^\[rank \d\] ", "", record.getMessage()))  # type: ignore[method-assign]
    LOGGER.addHandler(handler)
    try:
        yield found
    finally:
        LOGGER.removeHandler(handler)
