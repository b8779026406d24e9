"""The options of a schedule, and what follows from them: a memory limit, what is planned by cost, what is tried."""

from __future__ import annotations

from typing import Any

import pytest

from commfuse_fx.config.compile_config import CompileConfig, ScheduleConfig
from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from tests.config.configs import raises_naming


@pytest.mark.parametrize(
    ("error", "given", "part"),
    [
        (ConfigTypeError, {"memory_limit": "1GiB"}, "memory_limit is '1GiB'"),
        (ConfigTypeError, {"memory_limit": True}, "memory_limit is True"),
        (ConfigTypeError, {"memory_limit": 2.0**30}, "memory_limit is 1073741824.0"),
        (ConfigValueError, {"memory_limit": 0}, "memory_limit is 0"),
        (ConfigValueError, {"memory_limit": -1}, "memory_limit is -1"),
        (ConfigTypeError, {"across_steps": 1}, "across_steps is 1"),
        (ConfigTypeError, {"across_steps": "yes"}, "across_steps is 'yes'"),
        (ConfigValueError, {"mode": "none"}, "mode is 'none'"),
    ],
)
def test_schedule_config_refuses(error, given, part):
    with raises_naming(error, f"ScheduleConfig.{part}"):
        ScheduleConfig(**given)


@pytest.mark.parametrize(
    ("given", "limit", "across", "by_cost"),
    [
        ({}, None, False, False),
        ({"schedule": ScheduleConfig()}, None, False, False),
        ({"schedule": ScheduleConfig(memory_limit=5)}, 5, False, True),
        ({"schedule": ScheduleConfig(across_steps=True)}, None, True, True),
        ({"cluster": "gloo-1gbit"}, None, False, True),
        ({"cluster": "gloo-1gbit", "schedule": "none"}, None, False, False),
        ({"comm_fusion": {"allgather": {"mode": "optimal", "config": None}}, "schedule": "none"}, None, False, True),
        ({"comm_fusion": {"allgather": {"mode": "optimal", "config": None}, "openstate": False}}, None, False, False),
    ],
)
def test_what_makes_a_plan_by_cost(given, limit, across, by_cost):
    config = CompileConfig.resolve(given)
    assert (config.memory_limit, config.across_steps, config.plans_by_cost) == (limit, across, by_cost)


@pytest.mark.parametrize(
    ("schedule", "auto", "across", "tries"),
    [
        ("overlap", False, False, False),
        ("auto", True, False, True),
        (ScheduleConfig(), False, False, False),
        (ScheduleConfig(across_steps=True), False, True, True),
        (ScheduleConfig(mode="auto"), True, False, True),
        (ScheduleConfig(mode="auto", across_steps=False), True, False, False),
        (ScheduleConfig(mode="auto", across_steps=True), True, True, True),
    ],
)
def test_what_a_schedule_leaves_open(schedule: Any, auto: bool, across: bool, tries: bool) -> None:
    config = CompileConfig.resolve({"schedule": schedule})
    assert (config.is_auto, config.across_steps, config.tries_across_steps) == (auto, across, tries)
    assert config.asks_to_measure is auto


def test_what_runs_before_anything_is_measured() -> None:
    fusion = {"allreduce": {"mode": "optimal", "config": None}, "allgather": {"mode": "size", "config": 2}}
    schedule = ScheduleConfig(memory_limit=1 << 30, across_steps=True)
    asked = CompileConfig.resolve({"comm_fusion": fusion, "schedule": schedule, "cluster": "measured"})
    assert asked.measures and asked.asks_to_measure
    unmeasured = asked.unmeasured
    assert unmeasured.cluster is None and unmeasured.comm_fusion.is_optimal and unmeasured.across_steps
    first = asked.first
    assert first.cluster is None and not first.comm_fusion.is_optimal and first.comm_fusion.allgather.config == 2
    assert first.schedule == ScheduleConfig(memory_limit=1 << 30)
    for auto in ("auto", ScheduleConfig(mode="auto"), ScheduleConfig(mode="auto", across_steps=False)):
        assert CompileConfig.resolve({"schedule": auto}).first == CompileConfig.resolve({})
    limited = CompileConfig.resolve({"schedule": ScheduleConfig(mode="auto", memory_limit=5)})
    assert limited.first.schedule == ScheduleConfig(memory_limit=5)
    assert CompileConfig.resolve({"schedule": "none", "cluster": "measured"}).first.schedule == "none"


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({}, ScheduleConfig(memory_limit=7)),
        ({"schedule": "auto"}, ScheduleConfig(mode="auto", memory_limit=7)),
        ({"schedule": ScheduleConfig(across_steps=True)}, ScheduleConfig(memory_limit=7, across_steps=True)),
        ({"schedule": ScheduleConfig(memory_limit=7)}, ScheduleConfig(memory_limit=7)),
    ],
    ids=str,
)
def test_a_memory_limit_is_one_of_the_schedule(schedule: dict[str, Any], expected: ScheduleConfig) -> None:
    assert CompileConfig.resolve({**schedule, "memory_limit": 7}).schedule == expected


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"memory_limit": 7, "schedule": "none"}, ConfigValueError, 'memory_limit=7 with schedule="none".*leave one'),
        ({"memory_limit": 7, "schedule": ScheduleConfig(memory_limit=8)}, ConfigValueError, "give one of them"),
        ({"memory_limit": 0}, ConfigValueError, r"memory_limit is 0; give an int >= 1 \(bytes\), or None"),
        ({"memory_limit": "40GiB"}, ConfigTypeError, r"memory_limit is '40GiB'; give an int >= 1 \(bytes\)"),
        ({"memory_limit": True}, ConfigTypeError, "memory_limit is True"),
    ],
    ids=str,
)
def test_a_memory_limit_that_does_not_go(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        CompileConfig.resolve(options)
