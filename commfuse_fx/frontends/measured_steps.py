"""Training steps whose nodes are measured while they train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch

from commfuse_fx.frontends.runners import Runner
from commfuse_fx.frontends.voting import Voting
from commfuse_fx.measure.stopwatch import Stopwatch
from commfuse_fx.planning.plan_cache import Plan

ROUNDS = 5
"""Steps whose nodes are measured. The first one finds cold caches, and does not count."""


class MeasuredSteps:
    """Runs steps of one plan node by node. No rank has to know whether another one does.

    plan: whose steps are measured: the one that trains when they begin. spent: seconds that they have taken.
    """

    def __init__(self, voting: Voting) -> None:
        self.plan: Plan | None = None
        self.spent = 0.0
        self._voting = voting
        self._stopwatch: Stopwatch | None = None
        self._rounds: list[Mapping[str, float]] = []

    def wants(self, plan: Plan, runner: Runner) -> bool:
        """Whether a step of this plan is to be run by `run`."""
        if runner.ballot is None or not (runner.executor.has_run and plan.compiled.program.training):
            return False
        if self.plan is None:
            self.plan = plan
        return plan is self.plan

    def run(self, runner: Runner, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """A step, whose collectives end where they begin. Returns what `Executor.run` does."""
        self._voting.cast(runner)
        self._voting.settle(runner)
        executor, stopwatch = runner.executor, self._stopwatch
        if stopwatch is None or stopwatch.executor is not executor:
            stopwatch = self._stopwatch = Stopwatch(executor)
        began = perf_counter()

        def run(given: Sequence[Any]) -> tuple[Any, ...]:
            outputs, seconds = stopwatch.run(given)
            self._rounds.append(seconds)
            return outputs

        outputs = executor.run_by(run, inputs)
        self.spent += perf_counter() - began
        return outputs

    def seconds(self) -> dict[str, float] | None:
        """What each node takes on this rank, by `profile_key`; None where too few steps were of the plan."""
        if len(self._rounds) < ROUNDS:
            return None
        rounds = self._rounds[1:]
        return {key: median(each[key] for each in rounds) for key in self.keys}

    @property
    def keys(self) -> Sequence[str]:
        """What was measured, by `profile_key`."""
        return list(self._rounds[0]) if self._rounds else []
