"""The plans of one step that are made and compared: each on a copy of what all of them begin with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import inf

from commfuse_fx.cost.model import CostModel
from commfuse_fx.cost.too_little_memory import TooLittleMemory
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.text.write_text import canonical_text
from commfuse_fx.passes.declaration import Pass
from commfuse_fx.planning.pipeline.pass_table import TABLE
from commfuse_fx.planning.pipeline.pipeline import PassPipeline, PassRecord, Watcher
from commfuse_fx.planning.variants.attempts import Attempt, OnPlan
from commfuse_fx.simulate.rounds import play

WORTHWHILE = 1e-3
"""What a further search for buckets has to promise to be made: so much of the step's time, at best."""

Planned = tuple[Program, PassPipeline, list[PassRecord]]
"""A final program, the passes that made it, and what they did."""

Check = Callable[[Program, str], None]


@dataclass
class _Plan:
    """A plan that was made. noted: how many notes the program had after the first pass in which pipelines differ."""

    attempt: Attempt
    records: list[PassRecord]
    noted: int


class ComparedPlans:
    """The plans of one step that are made and compared.

    program, begun: what all of them begin with, and the passes that have made it. most: how many there may be.
    finds_again: whether a plan stands for all that come to the same graph.
    """

    def __init__(
        self,
        program: Program,
        begun: Sequence[PassRecord],
        costs: CostModel,
        most: int,
        check: Check | None,
        watcher: Watcher | None,
        tell: OnPlan,
        finds_again: bool,
    ) -> None:
        self._program, self._begun, self._costs, self._most = program, begun, costs, most
        self._check, self._watcher, self._tell, self._finds_again = check, watcher, tell, finds_again
        self._made: dict[int, _Plan] = {}  # by position
        self._known: dict[Hashable, int] = {}
        self._outcomes: list[tuple[Hashable, ...]] = []
        self._failed: list[TooLittleMemory] = []

    @property
    def attempts(self) -> list[Attempt]:
        """By position."""
        return [each.attempt for _, each in sorted(self._made.items())]

    @property
    def count(self) -> int:
        """How many different ones were made."""
        return len(self._outcomes)

    @property
    def has_any(self) -> bool:
        """Whether one fits."""
        return any(each.program is not None for each in self.attempts)

    @property
    def least(self) -> float:
        """Seconds of the fastest one."""
        return min((each.seconds for each in self.attempts if each.seconds is not None), default=inf)

    def has_outcomes_of(self, pipeline: PassPipeline) -> bool:
        """Whether a plan was made by passes that come to the same."""
        foreseen = _Outcomes(self._program)
        for item in pipeline.passes[len(self._begun) :]:
            foreseen.add(item, None)
        return foreseen.all in self._outcomes

    def plan(self, pipeline: PassPipeline, position: int | None = None) -> bool:
        """Make the plan of a pipeline. position: among plans of which the first is taken; by default the last.

        Whether it takes no longer than what it computes, so that searches for other buckets are of no use.
        """
        position = max(self._made, default=-1) + 1 if position is None else position
        shared = len(self._begun)
        own, records, outcomes, fits = self._program.copy(), [*self._begun], _Outcomes(self._program), True
        graph, noted = None, 0
        for number, item in enumerate(pipeline.passes[shared:], shared):
            if fits:
                try:
                    part = slice(number, number + 1)
                    records += pipeline.run(own, self._check, part=part, watcher=self._watcher)
                except TooLittleMemory as error:
                    self._failed.append(error)
                    fits = False
            if fits and item.optional and not records[-1].modified:
                return False  # the same as without that pass
            outcomes.add(item, own if fits else None)
            if self._finds_again and number == shared:
                graph, noted = (canonical_text(own), pipeline.passes[number + 1 :]), len(own.notes)
                if graph in self._known:
                    self._find_again(self._known[graph], position, own, pipeline, records)
                    self._known[graph] = min(self._known[graph], position)
                    return False
        self._outcomes.append(outcomes.all)
        seconds, busy = _predicted_seconds(own, self._costs) if fits else (None, 0.0)
        needed = 0 if fits else self._failed[-1].needed
        most = max(self._most, self.count)
        attempt = Attempt(self.count, most, pipeline, own if fits else None, seconds, needed)
        self._made[position] = _Plan(attempt, records, noted)
        self._known[graph] = position
        self._tell(attempt)
        return seconds is not None and busy > 0 and seconds <= busy * (1 + WORTHWHILE)

    def _find_again(
        self, known: int, position: int, own: Program, pipeline: PassPipeline, records: list[PassRecord]
    ) -> None:
        """The plan with the lower position stands for both, with what its own passes have noted."""
        plan = self._made[known]
        if known < position:
            self._made[position] = replace(plan, attempt=replace(plan.attempt, pipeline=pipeline, is_known=True))
            return
        program = plan.attempt.program
        if program is not None:
            program.notes = own.notes + program.notes[plan.noted :]
            program.strategies, program.search_seconds = own.strategies, own.search_seconds
        self._made[known] = replace(plan, attempt=replace(plan.attempt, is_known=True))
        attempt, later = replace(plan.attempt, pipeline=pipeline), plan.records[len(records) :]
        self._made[position] = _Plan(attempt, records + later, len(own.notes))

    def best(self) -> Planned:
        """The fastest plan, which gets the notes on those that were dropped."""
        fit = [each for _, each in sorted(self._made.items()) if each.attempt.program is not None]
        if not fit:
            raise min(self._failed, key=lambda error: error.needed)
        fit = [each for each in fit if not each.attempt.is_known]
        best = min(fit, key=lambda each: each.attempt.seconds or 0.0)
        program = best.attempt.program
        assert program is not None
        for item in (each for passes in TABLE.values() for each in passes):
            item.keep_notes(program, [each.attempt.program for each in fit if each.attempt.program is not None])
        return program, best.attempt.pipeline, best.records


class _Outcomes:
    """What the passes of a plan decide, those in which plans differ. before: the program that they begin with."""

    def __init__(self, before: Program) -> None:
        self.before = before
        self.all: tuple[Hashable, ...] = ()
        self._known: dict[str, Hashable] = {}

    def add(self, item: Pass, after: Program | None) -> None:
        """after: the program that the pass has made, None where it has not run."""
        found = item.outcome(self.before, after, self._known)
        self.all = (*self.all, found)
        self._known.update(dict.fromkeys(item.ensures, found))


def _predicted_seconds(program: Program, costs: CostModel) -> tuple[float, float]:
    """Of a step, rounded to nanoseconds (of equally fast plans the first is taken), and of the core's work in it, that
    of the backend included."""
    played = play(program, costs)
    host = sum(piece.transfer.least_host for pieces in played.pieces.values() for piece in pieces)
    return round(played.ended - played.began, 9), played.compute_seconds + host
