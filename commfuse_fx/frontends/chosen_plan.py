"""Which of several plans runs in place of the default plan of a call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from commfuse_fx.planning.alternatives import Candidate, table
from commfuse_fx.planning.compiled import Compiled
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.planning.planner import Planner
from commfuse_fx.planning.trials import Trials

TOPIC = "plans tried"

_MARK = "chosen "
_serials = count()


class ChosenPlan:
    """The plan that has been chosen among candidates, of which the first one is the default.

    base: the default plan that the candidates were made of. number: which candidate is chosen. is_final: whether it
    stays; calls of other shapes are then planned alike.
    """

    def __init__(self, planner: Planner, base: Plan | None = None, candidates: Sequence[Candidate] = ()) -> None:
        self.base = base
        self.candidates = list(candidates)
        self.number = 0
        self.is_final = False
        self._planner = planner
        self._serial = next(_serials)

    @property
    def candidate(self) -> Candidate:
        return self.candidates[self.number]

    def of(self, plan: Plan) -> Plan:
        """What runs in place of the default plan of a call."""
        if self.number == 0 or not plan.compiled.program.training or not (self.is_final or plan is self.base):
            return plan
        key = self._key()
        if key not in plan.others:
            if self.is_final:  # what earlier choices have left goes
                plan.others = {other: each for other, each in plan.others.items() if not other[0].startswith(_MARK)}
            plan.others[key] = Plan(self._compiled(plan.compiled), plan.signature, plan.guards)
        return plan.others[key]

    def _key(self) -> tuple[str, tuple[int, ...]]:
        """Where a plan keeps its like. A candidate of an earlier choice may have the same name, and is another plan."""
        return f"{_MARK}{self._serial} {self.candidate.name}", ()

    def shown(self, compiled: Compiled) -> Compiled:
        """What stays in place of a default plan; that one until it is known."""
        return self._compiled(compiled) if self.is_final and self.number and compiled.program.training else compiled

    def _compiled(self, compiled: Compiled) -> Compiled:
        if self.base is not None and compiled is self.base.compiled:
            return self.candidate.compiled
        return self._planner.planned_as(compiled, self.candidate.config)

    def stays(self, trials: Trials) -> str:
        """The plan that is chosen stays, and programs of the others may go. Returns what was tried, in words."""
        self.is_final = True
        program = self.candidate.compiled.program
        program.notes = [note for note in program.notes if note.topic != TOPIC]
        for number, each in enumerate(self.candidates):
            program.note(TOPIC, each.name, each.times(trials.seconds(number)))
        program.note(TOPIC, self.candidate.name, "stays")
        text = table(TOPIC, self.candidates, trials)
        if self.number:
            self._planner.publish(self.candidate.compiled)
        if self.base is not None:
            self.base.others = {key: plan for key, plan in self.base.others.items() if key == self._key()}
        self.candidates = [self.candidates[0], self.candidate] if self.number else [self.candidate]
        self.number = min(self.number, 1)
        return text
