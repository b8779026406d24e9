"""Plans take turns while they train, until one of them stays.

Why: docs/decisions.md, "What is tried costs little: no CUDA graph, no compile, three plans the second time".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from statistics import median

from commfuse_fx.trials.chosen_plan import ChosenPlan
from commfuse_fx.trials.step_clock import StepClock
from commfuse_fx.trials.trial_order import Trials

TURN_SECONDS, FEWEST, MOST = 0.4, 4, 60
"""A turn of a plan takes about so many seconds, and so many steps at least and at most, besides its first one."""

ATTEMPTS = 3
"""How often a turn is repeated, where a rank had other batches: so many times the number of plans in all."""


@dataclass
class Budget:
    """What measuring and trying plans may take. spent: so far, more than training by default would have taken.

    seconds: the most that may be spent. until: the number of the step at which all of it ends.
    """

    seconds: float
    until: int
    spent: float = 0.0


class PlanTurns:
    """The turns of some plans.

    chosen: whose candidates take turns. budget: what may be spent on them. decided: called when one of them is known to
    stay.
    """

    def __init__(self, clock: StepClock, chosen: ChosenPlan, budget: Budget, decided: Callable[[], None]) -> None:
        self.trials = Trials([each.label for each in chosen.candidates])
        self.chosen = chosen
        self._clock = clock
        self._budget = budget
        self._decided = decided
        self._void = 0  # turns

    def begin(self) -> None:
        """Let the first plan have its turn. It stays if it is the only one, or if making them has taken too long."""
        if max(self._clock.meet(self._budget.spent)) > self._budget.seconds:
            self.trials.stop()
        self._next()

    def _next(self) -> None:
        trials, chosen, clock = self.trials, self.chosen, self._clock
        chosen.number = trials.next
        if trials.is_over:
            self._decided()
            return
        step = trials.seconds(0) or chosen.candidates[0].predicted
        count = min(max(ceil(TURN_SECONDS / max(step, 1e-6)), FEWEST), MOST)
        if clock.steps + count + 1 > self._budget.until:
            trials.stop()
            self._next()
        else:
            clock.next_at(count + 1, self._end)  # the first one moves parameters, and may compile

    def _end(self) -> None:
        """All ranks learn what the turn took on the slowest one."""
        clock, trials = self._clock, self.trials
        mine = median(clock.times) if len(clock.times) >= FEWEST - 1 else None
        count = len(clock.times)
        everybody = clock.meet((mine, self._budget.spent))
        if any(seconds is None for seconds, _ in everybody):
            self._void += 1
            is_enough = self._void >= ATTEMPTS * len(trials.names)
        else:
            seconds = max(seconds for seconds, _ in everybody)
            trials.add(seconds)
            usual = trials.seconds(0) or seconds
            self._budget.spent += max(seconds - usual, 0.0) * count + max(clock.first - usual, 0.0)
            is_enough = max(spent for _, spent in everybody) > self._budget.seconds
        if is_enough:
            trials.stop()
        self._next()
