"""Trials of plans that take a few steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from commfuse_fx.cost.model import PER_ELEMENT, PER_VIEW
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.measure import contention_probe, network_probe
from commfuse_fx.trials import alternatives, measured_plans, measured_steps, plan_turns, replan
from commfuse_fx.trials import trial_order as trials
from commfuse_fx.trials.measured_plans import MeasuredPlans
from commfuse_fx.trials.measured_steps import MeasuredSteps
from commfuse_fx.trials.trial_order import Trials

MOST_STEPS = 400


NODE_SECONDS = 1e-4
NETWORK: dict[str, Any] = {
    "alpha": 1e-4,
    "alpha_busy": 2e-4,
    "bandwidth": 3e8,
    "bandwidth_busy": 2e8,
    "host_seconds_per_byte": 2e-10,
    "burst_bytes": 0.0,
    "burst_bandwidth": 0.0,
}
OVERHEAD = 1e-5
"""What is found when network and nodes have been measured: plans that follow from equal figures are made once."""


@contextmanager
def equal_figures() -> Iterator[None]:
    """Measure, and find the same every time."""
    measure, seconds = measured_plans.measured_cluster, MeasuredSteps.seconds

    def network(*args: Any) -> ClusterSpec:
        found = measure(*args)
        levels = tuple(replace(level, **NETWORK) for level in found.levels)
        return replace(found, levels=levels, device=replace(found.device, collective_overhead=OVERHEAD))

    def nodes(steps: MeasuredSteps) -> dict[str, float] | None:
        found = seconds(steps)
        return found and {key: 1e-9 if key.startswith((PER_ELEMENT, PER_VIEW)) else NODE_SECONDS for key in found}

    with patch.object(measured_plans, "measured_cluster", network), patch.object(MeasuredSteps, "seconds", nodes):
        yield


@contextmanager
def quickly(winner: str = "", as_measured: bool = False) -> Iterator[None]:
    """Measure for a moment, try all plans, and let this one stay if one is named, after one round. as_measured: whether
    plans follow from what was measured, or from equal figures."""

    def named(tried: Trials) -> int:
        return next((number for number, each in enumerate(tried.names) if each.split(",")[0] == winner), 0)

    with (
        ExitStack() as stack,
        patch.object(measured_plans, "NETWORK_SECONDS", 0.05),
        patch.multiple(network_probe, PAUSE=1e-3, PIPELINED_BYTES=1 << 16),
        patch.multiple(contention_probe, RUNS=(1, 1), ROW=1e-3, LEAST_IN_ROW=2, SPARSE=2, UPDATED=6 << 12),
        patch.object(MeasuredPlans, "pays_after", lambda self, seconds: True),
        patch.multiple(plan_turns, TURN_SECONDS=0.001, FEWEST=2),
        patch.multiple(trials, FEWEST=2, MOST=1 if winner else 3),
        patch.object(measured_steps, "ROUNDS", 2),
        patch.object(replan, "ROUNDS", 2),
        patch.multiple(alternatives, PROMISING=1e6, MOST=6, text_of=lambda candidate: str(id(candidate))),
        patch.object(measured_plans, "corrected", lambda profile, tried: profile),
    ):
        if winner:
            stack.enter_context(patch.multiple(Trials, winner=property(named), is_conclusive=True))
        if not as_measured:
            stack.enter_context(equal_figures())
        yield
