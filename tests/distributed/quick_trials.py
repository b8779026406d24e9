"""Trials of plans that take a few steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

from commfuse_fx.frontends import measured_plans, measured_steps, plan_turns, replan
from commfuse_fx.frontends.measured_plans import MeasuredPlans
from commfuse_fx.measure import contention_probe, network_probe
from commfuse_fx.planning import alternatives, trials
from commfuse_fx.planning.trials import Trials

MOST_STEPS = 400


@contextmanager
def quickly(winner: str = "") -> Iterator[None]:
    """Measure for a moment, try all plans, and let this one stay if one is named."""

    def named(tried: Trials) -> int:
        return next((number for number, each in enumerate(tried.names) if each.split(",")[0] == winner), 0)

    with (
        patch.object(measured_plans, "NETWORK_SECONDS", 0.05),
        patch.multiple(network_probe, PAUSE=1e-3, PIPELINED_BYTES=1 << 16),
        patch.multiple(contention_probe, RUNS=(1, 1), ROW=1e-3, LEAST_IN_ROW=2, SPARSE=2, UPDATED=6 << 12),
        patch.object(MeasuredPlans, "pays_after", lambda self, seconds: True),
        patch.multiple(plan_turns, TURN_SECONDS=0.001, FEWEST=2),
        patch.multiple(trials, FEWEST=2, MOST=3),
        patch.object(measured_steps, "ROUNDS", 2),
        patch.object(replan, "ROUNDS", 2),
        patch.multiple(alternatives, PROMISING=1e6, MOST=6, text_of=lambda candidate: str(id(candidate))),
        patch.object(measured_plans, "corrected", lambda profile, tried: profile),
        patch.multiple(Trials, winner=property(named), is_conclusive=True) if winner else nullcontext(),
    ):
        yield
