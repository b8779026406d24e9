"""Counts the training steps of a call, times them, and lets all ranks decide together between two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any

import torch

from commfuse_fx.measure.clocks import clock_of
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.votes.runners import Runner
from commfuse_fx.votes.voting import Voting


class StepClock:
    """A clock of training steps. All ranks have the same number of them, and so come to a decision at the same one.

    steps: how many there have been. is_paused: steps do not count now. is_mixed: whether steps of other plans, for
    batches of other sizes, are timed alike.

    On CUDA the end of a step is an event on the current stream: the host is ahead of the device.
    """

    def __init__(self, voting: Voting, device: torch.device) -> None:
        self.steps = 0
        self.is_paused = False
        self.is_mixed = False
        self.last: Plan | None = None
        """The plan of the last step."""
        self._voting = voting
        self._clock = clock_of([device.index] if device.type == "cuda" else [])
        self._runner: Runner | None = None  # of the last step
        self._ends = [self._clock.mark()]  # of the last decision, and of each step since then
        self._alike: list[bool] = []  # whether each of these steps was one of the plan before
        self._due = -1
        self._decide: Callable[[], None] = lambda: None

    def next_at(self, steps: int, decide: Callable[[], None]) -> None:
        """Let all ranks make a decision after so many more steps; no others are timed until then."""
        self._due, self._decide = self.steps + steps, decide
        self._ends, self._alike = [self._clock.mark()], []

    @property
    def first(self) -> float:
        """Seconds of the first step since the last decision. To be asked in a decision, as `times`."""
        return self._seconds()[0]

    @property
    def times(self) -> list[float]:
        """Seconds of the steps after the first one that followed another step of the same plan."""
        return [seconds for seconds, counts in zip(self._seconds()[1:], self._alike[1:], strict=True) if counts]

    def _seconds(self) -> list[float]:
        return [self._clock.seconds(*ends) for ends in pairwise(self._ends)]

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
            try:
                self._decide()
            except KeyboardInterrupt as error:  # the others have met this rank, and wait to meet it again
                self._voting.leave(error)
                raise

    def after_step(self, plan: Plan, runner: Runner, is_usual: bool = True) -> None:
        """After a step that ran this plan. is_usual: whether it took what such a step takes."""
        if self.is_paused or not plan.compiled.program.training:
            return
        self.steps += 1
        self._runner = runner
        if self.steps <= self._due:
            self._ends.append(self._clock.mark())
            self._alike.append(is_usual and (self.last is plan or self.is_mixed))
        self.last = plan
        if self.steps == self._due:
            self._clock.settle()

    def meet(self, mine: Any) -> list[Any]:
        """What each rank has, by rank: between two steps, after a vote.

        Raises what the vote raises, on all ranks alike; nothing has changed on any of them then.
        """
        assert self._runner is not None, "a step has run"
        return self._voting.meet(self._runner, mine)

    def outside_of_steps(self, what: str) -> AbstractContextManager[Callable[[Any], Any]]:
        """As that of the agreement, after `meet`."""
        return self._voting.outside_of_steps(what)
