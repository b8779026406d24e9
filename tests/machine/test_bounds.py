"""Figures that no machine has: refused with their name, value and range. None within the range hangs the planner."""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.machine import bounds
from commfuse_fx.machine.presets import preset
from commfuse_fx.machine.step_profile import StepProfile

PRESET = json.loads(preset("gloo-1gbit").to_json())
FIELDS = {
    "alpha": bounds.SECONDS,
    "alpha_busy": bounds.SECONDS,
    "bandwidth": bounds.SPEED,
    "bandwidth_busy": bounds.SPEED_OR_NONE,
    "burst_bytes": bounds.BYTES,
    "burst_bandwidth": bounds.SPEED_OR_NONE,
    "host_seconds_per_byte": bounds.SECONDS_PER_BYTE,
    "memory_bandwidth": bounds.SPEED,
    "op_overhead": bounds.SECONDS,
    "collective_overhead": bounds.SECONDS,
}
DEVICE = ("memory_bandwidth", "op_overhead", "collective_overhead")
WRONG = [math.nan, math.inf, -math.inf, 1e308, -1e308, -1.0, 10**400, True, "1.0", None, [1.0]]


@pytest.fixture(autouse=True)
def time_out() -> Iterator[None]:
    """Fails what hangs."""

    def fail(*_: Any) -> None:
        raise TimeoutError("still planning after 60 s")

    held = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, held)


def document(**figures: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(PRESET))
    for name, value in figures.items():
        (found["device"] if name in DEVICE else found["levels"][0])[name] = value
    return found


def lower(cluster: cf.ClusterSpec, **options: Any) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fusion = {"allreduce": {"mode": "optimal", "config": None}}
    step = cf.compile(
        model, fusion, loss_fn=nn.MSELoss(), optimizer=optimizer, device_num=4, cluster=cluster, **options
    )
    step.lower(torch.randn(2, 4), torch.randn(2, 4))


@pytest.mark.parametrize("name", FIELDS)
def test_figures_of_levels_and_devices(name: str) -> None:
    for value in [*WRONG, 1e-308]:
        body = document(**{name: value})
        del body["schema"], body["kind"]
        with pytest.raises((cf.ConfigTypeError, cf.ConfigValueError)) as raised:
            cf.ClusterSpec._from_body(body, "the file")
        assert name in str(raised.value)
        if isinstance(value, float) and abs(value) == 1e308:
            assert "1e+308" in str(raised.value)
    bound = FIELDS[name]
    with pytest.raises(cf.ConfigValueError, match=re.escape(f"{bound.least:g} to {bound.most:g} {bound.unit}")):
        bound.check(bound.most * 2, name)
    assert bound.check(bound.most, name) == bound.most and bound.check(bound.least, name) == bound.least


def cluster_of(levels: Any = None, ranks: Any = None, **figures: Any) -> cf.ClusterSpec:
    device = cf.Device(**{**PRESET["device"], **figures})
    return cf.ClusterSpec(name="c", device=device, levels=levels or preset("gloo-1gbit").levels, ranks=ranks)


def test_other_figures() -> None:
    refused = (cf.ConfigTypeError, cf.ConfigValueError)
    for value in [*WRONG, 0, 1 << 61]:
        with pytest.raises(refused, match="memory_bytes"):
            cluster_of(memory_bytes=value)
        with pytest.raises(refused, match="f32"):
            cluster_of(flops={"f32": value if value != 1 << 61 else 1e31})
        if value is None:
            continue
        with pytest.raises(refused, match="ranks"):
            cluster_of(ranks=value)
        if not isinstance(value, list):
            inner = cf.Level(name="l", alpha=0, bandwidth=1e9, domains=value)
            with pytest.raises(refused, match="domains"):
                cluster_of(levels=(inner, *preset("gloo-1gbit").levels))


def test_figures_of_profiles() -> None:
    for value in [*WRONG, 1e-308, 2e5]:
        with pytest.raises((cf.ConfigTypeError, cf.ConfigValueError), match="a/mm.0"):
            StepProfile(cluster=preset("gloo-1gbit"), world=2, model="0" * 64, node_seconds={"a/mm.0": value})
    for value in [*WRONG, 0, 1 << 25]:
        with pytest.raises((cf.ConfigTypeError, cf.ConfigValueError), match="world"):
            StepProfile(cluster=preset("gloo-1gbit"), world=value, model="0" * 64, node_seconds={"a/mm.0": 1.0})


@pytest.mark.parametrize("name", ["alpha", "bandwidth", "host_seconds_per_byte", "collective_overhead"])
def test_the_planner_ends_at_both_ends_of_the_range(name: str) -> None:
    across = {"schedule": cf.ScheduleConfig(across_steps=True)}
    for value, options in ((FIELDS[name].least, {}), (FIELDS[name].most, across)):
        lower(cf.ClusterSpec.from_json(json.dumps(document(**{name: value}))), **options)
