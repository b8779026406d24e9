"""Counts the training steps of a call, times them, and lets all ranks decide together between two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from commfuse_fx.frontends.runners import Runner
from commfuse_fx.frontends.voting import Voting
from commfuse_fx.measure.probe import synchronize
from commfuse_fx.planning.plan_cache import Plan


class StepClock:
    """A clock of training steps. All ranks have the same number of them, and so come to a decision at the same one.

    steps: how many there have been. first: seconds of the first one since the last decision. times: seconds of those
    after it that followed another step of the same plan. is_paused: steps do not count now. is_mixed: whether steps of
    other plans, for batches of other sizes, are timed alike.
    """

    def __init__(self, voting: Voting, device: torch.device) -> None:
        self.steps = 0
        self.first = 0.0
        self.times: list[float] = []
        self.is_paused = False
        self.is_mixed = False
        self.last: Plan | None = None
        """The plan of the last step."""
        self._voting = voting
        self._device = device
        self._runner: Runner | None = None  # of the last step
        self._is_first = True
        self._ended = perf_counter()  # the last step, or the last decision
        self._due = -1
        self._decide: Callable[[], None] = lambda: None

    def next_at(self, steps: int, decide: Callable[[], None]) -> None:
        """Let all ranks make a decision after so many more steps; no others are timed until then."""
        self._due, self._decide, self.times = self.steps + steps, decide, []
        self._is_first, self._ended = True, perf_counter()

    @property
    def is_due(self) -> bool:
        """Whether a decision comes before the next step."""
        return self.steps == self._due and not self.is_paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Steps inside of the block do not count."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def before_step(self) -> None:
        """Before a training step. Where a decision is due, all ranks make it together."""
        if self.is_due:
            self._decide()

    def after_step(self, plan: Plan, runner: Runner) -> None:
        """After a step that ran this plan."""
        if self.is_paused or not plan.compiled.program.training:
            return
        self.steps += 1
        self._runner = runner
        if self.steps == self._due:
            synchronize(self._device)
        now = perf_counter()
        if self._is_first:
            self._is_first, self.first = False, now - self._ended
        elif self.last is plan or self.is_mixed:
            self.times.append(now - self._ended)
        self.last, self._ended = plan, now

    def meet(self, mine: Any) -> list[Any]:
        """What each rank has, by rank: between two steps, after a vote.

        Raises what the vote raises, on all ranks alike; nothing has changed on any of them then.
        """
        assert self._runner is not None, "a step has run"
        return self._voting.meet(self._runner, mine)
