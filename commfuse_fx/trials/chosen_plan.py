"""Which of several plans runs in place of the default plan of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from commfuse_fx.cost.model import CostModel
from commfuse_fx.machine.step_profile import StepProfile
from commfuse_fx.planning.compiled import Compiled
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.planning.planner import Planner
from commfuse_fx.planning.variants.shared_prices import Seconds, seconds_by_name
from commfuse_fx.trials.alternatives import Candidate

TOPIC = "plans tried"

_MARK = "chosen "
_serials = count()


def prices(base: Plan, profile: StepProfile) -> Seconds:
    """What the nodes of a default plan take by a profile, for plans of all sizes."""
    compiled = base.compiled
    assert compiled.captured is not None
    return seconds_by_name(compiled.captured, compiled.pipeline, CostModel(profile.cluster, profile.node_seconds))


@dataclass(frozen=True)
class FoundPlans:
    """Plans to choose among, the same on all ranks. The first candidate is the default plan.

    base: the default plan that the others are made of. profile: what they follow from. common: what nodes take, where
    ranks have batches of several sizes; all of them are then planned alike from the beginning.
    """

    candidates: list[Candidate]
    base: Plan
    profile: StepProfile
    common: Seconds | None


class ChosenPlan:
    """The plan that has been chosen among those that were found; where none were, the default plan of a call.

    number: which candidate is chosen. is_final: whether it stays; calls of other sizes are then planned alike.
    """

    def __init__(self, planner: Planner, found: FoundPlans | None = None) -> None:
        self.found = found
        self.candidates = [] if found is None else found.candidates
        self.number = 0
        self.is_final = False
        self._notes: list[tuple[str, str]] = []  # subjects and reasons, once it is final
        self._planner = planner
        self._serial = next(_serials)

    @property
    def candidate(self) -> Candidate:
        return self.candidates[self.number]

    def of(self, plan: Plan) -> Plan:
        """What runs in place of the default plan of a call."""
        found = self.found
        if self.number == 0 or found is None or not plan.compiled.program.training:
            return plan
        if not (self.is_final or found.common is not None or plan is found.base):
            return plan
        key = self._key()
        if key not in plan.others:
            if self.is_final:  # what earlier choices have left goes
                plan.others = {other: each for other, each in plan.others.items() if not other[0].startswith(_MARK)}
            compiled, config = self._compiled(plan.compiled), self.candidate.config
            common = found.common if plan is found.base else self._common
            plan.others[key] = Plan(compiled, plan.signature, plan.guards, config=config, common=common)
        return plan.others[key]

    def _key(self) -> tuple[str, tuple[int, ...]]:
        """Where a plan keeps its like. A candidate of an earlier choice may have the same name, and is another plan."""
        return f"{_MARK}{self._serial} {self.candidate.label}", ()

    def shown(self, compiled: Compiled) -> Compiled:
        """What stays in place of a default plan; that one until it is known."""
        if not self.is_final or not compiled.program.training:
            return compiled
        return self._noted(self._compiled(compiled) if self.number else compiled)

    def _compiled(self, compiled: Compiled) -> Compiled:
        if self.found is not None and compiled is self.found.base.compiled:
            return self.candidate.compiled
        return self._planner.planned_as(compiled, self.candidate.config, self._common)

    def _noted(self, compiled: Compiled) -> Compiled:
        """The same, which says what was tried."""
        program = compiled.program
        program.notes = [note for note in program.notes if note.topic != TOPIC]
        for subject, reason in self._notes:
            program.note(TOPIC, subject, reason)
        return compiled

    @cached_property
    def _common(self) -> Seconds | None:
        """What nodes take in all plans of other sizes: ranks whose batches differ in size come to the same plan."""
        found = self.found
        if found is None or found.common is not None:
            return None if found is None else found.common
        return prices(found.base, found.profile)

    def stays(self, tried: Mapping[str, str]) -> None:
        """The plan that is chosen stays, and programs of the others may go.

        tried: what is known of each plan that was tried, by its name.
        """
        assert self.found is not None, "the plans that were tried"
        self.is_final = True
        self._notes = [*tried.items(), (self.candidate.label, "stays")]
        self._noted(self.candidate.compiled)
        if self.number:
            self._planner.publish(self.candidate.compiled)
        base = self.found.base
        base.others = {key: plan for key, plan in base.others.items() if key == self._key()}
        self.candidates = [self.candidates[0], self.candidate] if self.number else [self.candidate]
        self.number = min(self.number, 1)
