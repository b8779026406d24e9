"""Which of several plans runs in place of the default plan of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import count

from commfuse_fx.cost.model import CostModel
from commfuse_fx.machine.step_profile import StepProfile
from commfuse_fx.planning.alternatives import Candidate
from commfuse_fx.planning.compiled import Compiled
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.planning.planner import Planner
from commfuse_fx.planning.shared_prices import Seconds, seconds_by_name

TOPIC = "plans tried"

_MARK = "chosen "
_serials = count()


class ChosenPlan:
    """The plan that has been chosen among candidates, of which the first one is the default.

    base: the default plan that the candidates were made of. profile: what they were made from. common: what nodes take,
    where ranks have batches of several sizes; all of them are then planned alike from the beginning. number: which
    candidate is chosen. is_final: whether it stays; calls of other sizes are then planned alike.
    """

    def __init__(
        self,
        planner: Planner,
        base: Plan | None = None,
        candidates: Sequence[Candidate] = (),
        profile: StepProfile | None = None,
        common: Seconds | None = None,
    ) -> None:
        self.base = base
        self.candidates = list(candidates)
        self.profile = profile
        self.is_mixed = common is not None
        self.number = 0
        self.is_final = False
        self._given = common
        self._planner = planner
        self._serial = next(_serials)

    @property
    def candidate(self) -> Candidate:
        return self.candidates[self.number]

    def of(self, plan: Plan) -> Plan:
        """What runs in place of the default plan of a call."""
        for_all = self.is_final or self.is_mixed
        if self.number == 0 or not plan.compiled.program.training or not (for_all or plan is self.base):
            return plan
        key = self._key()
        if key not in plan.others:
            if self.is_final:  # what earlier choices have left goes
                plan.others = {other: each for other, each in plan.others.items() if not other[0].startswith(_MARK)}
            compiled, config = self._compiled(plan.compiled), self.candidate.config
            common = self._given if plan is self.base else self._common
            plan.others[key] = Plan(compiled, plan.signature, plan.guards, config=config, common=common)
        return plan.others[key]

    def _key(self) -> tuple[str, tuple[int, ...]]:
        """Where a plan keeps its like. A candidate of an earlier choice may have the same name, and is another plan."""
        return f"{_MARK}{self._serial} {self.candidate.label}", ()

    def shown(self, compiled: Compiled) -> Compiled:
        """What stays in place of a default plan; that one until it is known."""
        return self._compiled(compiled) if self.is_final and self.number and compiled.program.training else compiled

    def _compiled(self, compiled: Compiled) -> Compiled:
        if self.base is not None and compiled is self.base.compiled:
            return self.candidate.compiled
        return self._planner.planned_as(compiled, self.candidate.config, self._common)

    @cached_property
    def _common(self) -> Seconds | None:
        """What nodes take in all plans of other sizes: ranks whose batches differ in size come to the same plan."""
        base, profile = self.base, self.profile
        if self._given is not None:
            return self._given
        if base is None or profile is None or base.compiled.captured is None:
            return None
        costs = CostModel(profile.cluster, profile.node_seconds)
        return seconds_by_name(base.compiled.captured, base.compiled.pipeline, costs)

    def stays(self, tried: Mapping[str, str]) -> None:
        """The plan that is chosen stays, and programs of the others may go.

        tried: what is known of each plan that was tried, by its name.
        """
        self.is_final = True
        program = self.candidate.compiled.program
        program.notes = [note for note in program.notes if note.topic != TOPIC]
        for name, times in tried.items():
            program.note(TOPIC, name, times)
        program.note(TOPIC, self.candidate.label, "stays")
        if self.number:
            self._planner.publish(self.candidate.compiled)
        if self.base is not None:
            self.base.others = {key: plan for key, plan in self.base.others.items() if key == self._key()}
        self.candidates = [self.candidates[0], self.candidate] if self.number else [self.candidate]
        self.number = min(self.number, 1)
