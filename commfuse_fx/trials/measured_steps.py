"""Training steps whose nodes are measured while they train.

Why: docs/decisions.md, "Steps are measured while they train, and plans tried in turns".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

from commfuse_fx.measure.stopwatch import Stopwatch
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.votes.runners import Runner
from commfuse_fx.votes.voting import Voting

Run = Callable[[Sequence[Any]], tuple[Any, ...]]
"""What runs a program on the values of its placeholders, and returns its outputs."""

Result = TypeVar("Result")

ROUNDS = 5
"""Steps whose nodes are measured. The first one of each plan finds cold caches, and counts only where it is the only
one."""


class MeasuredSteps:
    """Runs steps node by node. No rank has to know whether another one does.

    plan: the last one whose steps were measured. spent: seconds that all of them have taken.
    """

    def __init__(self, voting: Voting) -> None:
        self.plan: Plan | None = None
        self.spent = 0.0
        self._voting = voting
        self._stopwatches: dict[Executor, Stopwatch] = {}
        self._first: list[Mapping[str, float]] = []  # of each plan
        self._later: list[Mapping[str, float]] = []

    @staticmethod
    def wants(plan: Plan, runner: Runner) -> bool:
        """Whether a step of this plan is to be run by `run`."""
        executor = runner.executor
        return executor.has_collectives and executor.has_run and plan.compiled.program.training

    def run(self, plan: Plan, runner: Runner, run_by: Callable[[Run], Result]) -> Result:
        """A step, whose collectives end where they begin.

        run_by: runs the step by another function than its generated code. Returns what that does.
        """
        executor = runner.executor
        is_first = executor not in self._stopwatches
        if is_first:
            self._stopwatches[executor] = Stopwatch(executor)
        stopwatch = self._stopwatches[executor]
        began = perf_counter()

        def agree() -> None:  # a rank whose forward fails can still say so
            self._voting.cast(runner)
            self._voting.settle(runner)

        def run(given: Sequence[Any]) -> tuple[Any, ...]:
            outputs, seconds = stopwatch.run(given, agree)
            (self._first if is_first else self._later).append(seconds)
            return outputs

        result = run_by(run)
        self.spent += perf_counter() - began
        self.plan = plan
        return result

    @property
    def is_mixed(self) -> bool:
        """Whether steps of several plans were measured: this rank has batches of several sizes."""
        return len(self._first) > 1

    def release(self) -> None:
        """Let go of what ran the steps."""
        self._stopwatches.clear()

    def seconds(self) -> dict[str, float] | None:
        """What each node takes on this rank, by `profile_key`; None where too few steps were measured."""
        if len(self._first) + len(self._later) < ROUNDS:
            return None
        found: dict[str, list[float]] = {}
        for each in self._later or self._first:
            for key, seconds in each.items():
                found.setdefault(key, []).append(seconds)
        return {key: median(each) for key, each in found.items()}


def combined(everybody: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median over the ranks, of what all of them have measured."""
    keys: Iterable[str] = (key for key in everybody[0] if all(key in each for each in everybody))
    return {key: median(each[key] for each in everybody) for key in keys}
