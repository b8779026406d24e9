"""Which of several plans runs next, and which one stays.

Plans take turns, there and back again, so that a machine that gets slower or faster does not decide. The first plan is
the one that runs by default: another one stays only where it was clearly faster, in pairs of neighbouring turns. What
is slower by far has no further turn, the default neither: then the others are compared with the fastest one so far.

Why: docs/decisions.md, "Steps are measured while they train, and plans tried in turns".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import mean, median, stdev

FEWEST, MOST = 4, 8
"""Rounds in which every plan that is left has a turn, at least and at most."""

CLEARLY = 0.99
"""A plan is clearly faster than another one if it takes at most so much of its time."""

HOPELESS = 1.05
"""A plan that took more of the fastest one's time, in the median of its rounds, has no further turn."""

BEATEN = 0.8
"""A plan that took at most so much of the default's time in each of its rounds takes the default's place, if these
differ by at most a quarter of what it saves."""

ERRORS = (3.18, 2.78, 2.57, 2.45, 2.36)
"""Standard errors of a mean that a difference has to exceed, for 4 to 8 pairs: the 97.5% quantiles of Student's t
distribution with 3 to 7 degrees of freedom (Student, "The probable error of a mean", 1908)."""


@dataclass
class Trials:
    """The trials of some plans, numbered from 0; 0 is the default.

    names: of the plans. rounds: measured seconds of a step, by round and plan.
    """

    names: Sequence[str]
    rounds: list[dict[int, float]] = field(default_factory=lambda: [{}])
    _left: list[int] = field(default_factory=list)
    _base: int = 0  # the plan that others are compared with
    _is_cut_short: bool = False
    is_over: bool = False

    def __post_init__(self) -> None:
        self._left = list(range(len(self.names)))
        self.is_over = len(self._left) < 2

    @property
    def next(self) -> int:
        """The plan whose turn it is; that which stays when the trials are over."""
        return self.winner if self.is_over else self._turns()[len(self.rounds[-1])]

    def _turns(self) -> list[int]:
        """The order of this round: there, and back again."""
        return self._left if len(self.rounds) % 2 else self._left[::-1]

    def add(self, seconds: float) -> None:
        """What a step took in the turn of `next`."""
        self.rounds[-1][self.next] = seconds
        if len(self.rounds[-1]) == len(self._left):
            self._end_round()

    def stop(self) -> None:
        """End the trials before their time, as they have taken enough."""
        self.is_over = self._is_cut_short = True

    def seconds(self, plan: int) -> float | None:
        """The median of what a step of this plan took; None if it has not run."""
        found = [each[plan] for each in self.rounds if plan in each]
        return median(found) if found else None

    @property
    def is_conclusive(self) -> bool:
        """Whether the next run need not try these plans: those that are left had turns enough, and the default does not
        stay only because turns differ too much to say that another one is faster."""
        rivals = [plan for plan in self._left if plan != self._base]
        if self._is_cut_short and any(len(self._pairs(plan)) < FEWEST for plan in rivals):
            return False
        return self.winner != 0 or all(self._ratio(plan) > CLEARLY for plan in rivals)

    @property
    def winner(self) -> int:
        """The fastest plan among those that are clearly faster than what they are compared with; that if there is
        none."""
        faster = [plan for plan in self._left if plan != self._base and self._is_clearly_faster(plan)]
        return min(faster, key=self._ratio, default=self._base)

    def _pairs(self, plan: int) -> list[float]:
        """What the plan took of the time of the one that it is compared with, by round."""
        return [each[plan] / each[self._base] for each in self.rounds if plan in each and self._base in each]

    def _ratio(self, plan: int) -> float:
        return median(self._pairs(plan)) if plan != self._base else 1.0

    def _is_clearly_faster(self, plan: int) -> bool:
        pairs = self._pairs(plan)
        if len(pairs) < FEWEST or median(pairs) > CLEARLY:
            return False
        return mean(pairs) + _margin(pairs) < 1

    def _end_round(self) -> None:
        count = len(self.rounds)
        if count > 1:
            best = min(self._left, key=self._ratio)
            slow = HOPELESS * self._ratio(best)
            # What others are compared with stays among them, unless it is beaten by far in every round.
            self._left = [plan for plan in self._left if plan == self._base or self._ratio(plan) <= slow]
            if best != self._base and self._is_beaten_by(self._pairs(best)):
                self._left.remove(self._base)
                self._base = best
        if count >= MOST or len(self._left) < 2 or (count >= FEWEST and self._is_decided()):
            self.is_over = True
        else:
            self.rounds.append({})

    def _is_beaten_by(self, pairs: Sequence[float]) -> bool:
        """Whether few rounds are enough to know that a plan with these is faster."""
        most, least = max(pairs), min(pairs)
        return most <= BEATEN and 4 * (most - least) <= 1 - most

    def _is_decided(self) -> bool:
        """Whether more rounds would hardly change which plan stays."""
        winner = self.winner
        rivals = [plan for plan in self._left if plan != winner]
        return all(self._is_behind(plan, winner) for plan in rivals)

    def _is_behind(self, plan: int, winner: int) -> bool:
        pairs = [each[plan] / each[winner] for each in self.rounds if plan in each and winner in each]
        if len(pairs) < FEWEST:
            return False
        return mean(pairs) - _margin(pairs) > CLEARLY


def _margin(pairs: Sequence[float]) -> float:
    """How far the mean of such pairs may be from what it is the mean of."""
    return ERRORS[len(pairs) - FEWEST] * stdev(pairs) / sqrt(len(pairs))
