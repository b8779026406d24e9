"""A step that measures itself while it trains, tries other plans, and goes on with the one that measures fastest.

All ranks do the same at the same step: what follows from measurements follows from those of all ranks, which they
exchange between two steps, after a vote. Nothing has changed on any rank if that vote fails.

Why: docs/decisions.md, "There is a default cluster, and several ranks measure their own".
Why: docs/decisions.md, "Steps are measured while they train, and plans tried in turns".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from statistics import median, median_low
from time import perf_counter

import torch

from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.config.options import TrialLimits
from commfuse_fx.errors import PlanMismatchError
from commfuse_fx.machine.step_profile import StepProfile
from commfuse_fx.planning.compiled import Compiled
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.planning.planner import Planner
from commfuse_fx.support.logs import logger
from commfuse_fx.trials.alternatives import DEFAULT, Candidate, text_of, worth_a_trial
from commfuse_fx.trials.chosen_plan import TOPIC, ChosenPlan, FoundPlans
from commfuse_fx.trials.kept_plans import KeptPlans
from commfuse_fx.trials.measured_plans import MeasuredPlans
from commfuse_fx.trials.measured_steps import ROUNDS, MeasuredSteps, Result, Run, combined
from commfuse_fx.trials.pace import CALM_SECONDS, CHANGED, Pace, slow_ranks
from commfuse_fx.trials.plan_turns import Budget, PlanTurns
from commfuse_fx.trials.step_clock import StepClock
from commfuse_fx.trials.trial_order import Trials
from commfuse_fx.votes.runners import Runner
from commfuse_fx.votes.voting import Voting

log = logger("plan")

WARM = 2
"""Training steps before it is looked at whether to measure, besides the first one."""

ATTEMPTS = 10
"""How often some more steps are measured, where a rank had too few of plans that had run before."""

BEFORE = "as before"
"""Remark on the plan that ran when the pace changed."""


class Replan:
    """Decides which plan runs in place of the default one of a call.

    asked: what the user has asked for. preset: the same with figures that are assumed. is_settled: whether the plan
    that runs stays. profile: what was measured of network and nodes, or given; None until then. let_go: gives back
    what plans keep between steps, when another one is to run, so that no two of them are in memory.
    """

    def __init__(
        self,
        planner: Planner,
        voting: Voting,
        asked: CompileConfig,
        preset: CompileConfig,
        rank: int,
        let_go: Callable[[], None],
    ) -> None:
        planner.keeps_captured = True
        self.is_settled = False
        self.profile: StepProfile | None = None
        self._planner = planner
        self._voting = voting
        self._asked = asked
        self._preset = preset
        self._limits = asked.replan if isinstance(asked.replan, TrialLimits) else TrialLimits()
        self._rank = rank
        self._let_go = let_go
        device = next((param.device for param in planner.model.parameters()), torch.device("cpu"))
        self.clock = StepClock(voting, device)
        self._plans = MeasuredPlans(planner, asked, self.clock, device)
        # Each rank of a module has forwards of its own, whose backwards run with what is chosen by then.
        self.clock.is_mixed = planner.form == "module"
        self.profile_to_keep: StepProfile | None = None
        """That with the last plan that stayed, here or in the run that goes on here."""
        self._begin()

    def _begin(self) -> None:
        self._budget = self._whole_budget()
        self._kept: KeptPlans | None = None
        self._is_to_keep = False  # whether the plan that stays was found in trials that came to their end
        self._is_known = False  # whether a plan of an earlier run is tried, and nothing is measured
        self._pace: Pace | None = None  # of the plan that stays
        self._before: ChosenPlan | None = None  # what ran when the pace changed
        self._step_seconds = 0.0  # when the pace was last looked at
        self._computed = 0.0  # seconds that a step computed, on ranks that were not slow, when plans were last made
        self._calm = CALM_SECONDS / 2
        self._forget()
        self.clock.next_at(1, self._go_on_as_kept)

    def _forget(self) -> None:
        """Run the default plan."""
        self._chosen = ChosenPlan(self._planner)
        self._turns: PlanTurns | None = None
        self._tried: dict[str, str] = {}
        self._is_corrected = False
        self._attempts = 0
        self._is_measuring = False
        self._measured = MeasuredSteps(self._voting)

    def _whole_budget(self) -> Budget:
        return Budget(self._limits.seconds, self.clock.steps + self._limits.steps)

    # What the session asks and tells.

    def before_step(self) -> None:
        """Before a training step. Where a decision is due, all ranks make it together."""
        if not self.clock.is_due:
            return
        chosen, number, is_settled = self._chosen, self._chosen.number, self.is_settled
        self.clock.before_step()
        if (chosen, number, is_settled) != (self._chosen, self._chosen.number, self.is_settled):
            self._let_go()

    def paused(self) -> AbstractContextManager[None]:
        """Steps inside of the block do not count, and the plan that runs stays."""
        return self.clock.paused()

    def restart(self) -> None:
        """Plans that were measured are gone: begin anew. All ranks do."""
        if not self.is_settled:
            self._begin()

    def go_on_with(self, profile: StepProfile) -> None:
        """If nothing has been tried yet, begin with the plan of the run that goes on here. All ranks do."""
        if self.profile is None:
            self.profile_to_keep = profile

    def chosen(self, plan: Plan) -> Plan:
        """The plan that runs in place of the default plan of a call."""
        return self._chosen.of(plan)

    def shown(self, compiled: Compiled) -> Compiled:
        """What stays in place of a default plan; until that is known, what was asked for with assumed figures."""
        if self.is_settled or self._before is not None or not compiled.program.training:
            return self._chosen.shown(compiled)
        is_default = self._preset.header() == self._planner.config.header()
        return compiled if is_default else self._planner.planned_as(compiled, self._preset)

    @property
    def chosen_name(self) -> str:
        """The name of the plan that runs."""
        return self._chosen.candidate.name if self._chosen.candidates else DEFAULT

    @property
    def profile_used(self) -> StepProfile | None:
        """The profile, with the name of the plan that stays and what its steps take, once that is known."""
        if self.profile is None or not self.is_settled or not self._chosen.candidates:
            return self.profile
        usual = 0.0 if self._pace is None else self._pace.usual
        return replace(self._profile_of_plan(), plan=self._chosen.candidate.name, step_seconds=usual)

    def measures(self, plan: Plan, runner: Runner) -> bool:
        """Whether a step of this plan is to be run by `run_measured`."""
        return self._is_measuring and not self.clock.is_paused and self._measured.wants(plan, runner)

    def run_measured(self, plan: Plan, runner: Runner, run_by: Callable[[Run], Result]) -> Result:
        """A training step, as `MeasuredSteps.run` runs it."""
        return self._measured.run(plan, runner, run_by)

    @property
    def runs_another(self) -> bool:
        """Whether another plan than the default runs, on all ranks alike."""
        return self._chosen.number != 0

    def differ(self, mismatch: PlanMismatchError) -> None:
        """Batches of several sizes have led ranks to other plans, which all of them learn from the vote. Nothing has
        been sent yet; they run the default plan, and make others that suit all sizes."""
        log.info("batches of several sizes have led to other plans: %s", mismatch)
        if self.clock.is_mixed:
            self._give_up("plans for batches of several sizes differ between ranks")
        else:
            self.clock.is_mixed = True
            self._budget, self.is_settled, self._before, self._is_known = self._whole_budget(), False, None, False
            self._measure()

    # Where figures were given, or an earlier run of the same step has left its plan, nothing is measured.

    def _go_on_as_kept(self) -> None:
        base = self.clock.last
        assert base is not None
        given = self._asked.cluster
        if isinstance(given, StepProfile):
            kept: StepProfile | None = given
        else:
            self._kept = self._plans.kept(base)
            kept = self.profile_to_keep or self.clock.meet(self._plans.read(self._kept) if self._rank == 0 else None)[0]
        found = None if kept is None else self._plans.of(base, kept)
        if found is not None and found.profile.plan in [each.name for each in found.candidates]:
            log.info("an earlier run has come to plan %s, which is tried first", found.profile.plan)
            self._is_known = True
            self._try(found, [each for each in found.candidates if each.name in (DEFAULT, found.profile.plan)])
        elif found is not None and kept is given:
            self._try(found, worth_a_trial(found.candidates))
        elif not self._plans.fits(limit := self._limits.seconds):
            self._give_up(f"TrialLimits(seconds={limit}) is less than measuring takes")
        else:
            self._began = perf_counter()
            self.clock.next_at(WARM, self._measure_in_long_runs)

    # Plans follow from what the nodes take and what the network takes.

    def _measure_in_long_runs(self) -> None:
        """Measure, but not before the run has trained for as long as that takes: shorter ones would only lose."""
        if all(self.clock.meet(self._plans.pays_after(perf_counter() - self._began))):
            self._budget = self._whole_budget()
            self._measure()
        else:
            self.clock.next_at(self.clock.steps, self._measure_in_long_runs)

    def _measure(self) -> None:
        """Run the default plan, and measure its steps."""
        self._forget()
        self._is_measuring = True
        self.clock.next_at(ROUNDS, self._plan_from_measured)

    def _plan_from_measured(self) -> None:
        measured = self._measured
        everybody, mixed = zip(*self.clock.meet((measured.seconds(), measured.is_mixed)), strict=True)
        if None in everybody or not combined(everybody):
            self._attempts += 1
            if self._attempts < ATTEMPTS:
                self.clock.next_at(ROUNDS, self._plan_from_measured)
            else:
                self._give_up("batches have too many sizes, so nothing was measured")
            return
        self._is_measuring = False
        self.clock.is_mixed |= any(mixed)
        began = perf_counter()
        if self._is_slow_alone([sum(each.values()) for each in everybody]):
            log.info("no other plan is made: the other ranks are as fast as before")
            assert self._before is not None
            self._chosen = self._before
            self._stay(self._step_seconds)
            return
        base = measured.plan
        assert base is not None
        measured.release()
        plans = self._plans.of(base, self._plans.profile(combined(everybody)))
        before = self._before
        if before is None:
            found = worth_a_trial(plans.candidates)
        else:  # soon: the most promising plan, and that which ran
            found = worth_a_trial(plans.candidates, 2)
            ran = text_of(before.candidate)
            if before.number and all(text_of(each) != ran for each in found):
                found.append(replace(before.candidate, remark=BEFORE))
        self._budget.spent += measured.spent + perf_counter() - began
        log.info("plans by what was measured:\n%s", _lines({each.label: each.times(None) for each in found}))
        self._computed = median_low([sum(each.values()) for each in everybody])
        self._try(plans, found)

    # Plans take turns.

    def _try(self, plans: FoundPlans, candidates: list[Candidate]) -> None:
        """Let some of the plans that were found take turns."""
        self.profile = plans.profile
        self._chosen = ChosenPlan(self._planner, replace(plans, candidates=candidates))
        self._turns = PlanTurns(self.clock, self._chosen, self._budget, self._decided)
        self._turns.begin()

    def _decided(self) -> None:
        """The plans that took turns are measured."""
        turns, chosen = self._turns, self._chosen
        assert turns is not None
        name, known = chosen.candidate.name, chosen.candidates[-1].name
        if self._is_known and name != known:
            log.info("plan %s is no longer faster: measuring anew", known)
            self._is_known, self.profile_to_keep = False, None
            self._measure()
            return
        for number, each in enumerate(chosen.candidates):
            self._tried[each.label] = each.times(turns.trials.seconds(number))
        if not self._is_corrected and not self._is_known:
            self._is_corrected = True
            began = perf_counter()
            more = self._plans.taught(chosen, turns.trials)
            self._budget.spent += perf_counter() - began
            if more is not None:
                self._try(more, more.candidates)
                return
        self._settle(turns.trials)

    def _settle(self, trials: Trials) -> None:
        """Let the chosen plan stay. trials: those that it comes from."""
        chosen = self._chosen
        step_seconds = trials.seconds(trials.winner) or chosen.candidate.predicted
        chosen.stays(self._tried)
        label, spent = chosen.candidate.label, self._budget.spent
        log.info(
            "plan %s stays, after %d steps and %.1f s\n%s:\n%s",
            *(label, self.clock.steps, spent, TOPIC, _lines(self._tried)),
        )
        assert self.profile is not None
        self._stay(step_seconds, self.profile.step_seconds if self._is_known else 0.0)
        self._is_to_keep = trials.is_conclusive and not self.profile.step_seconds
        self._keep()

    def _keep(self) -> None:
        """Keep the plan for the next run: when it is chosen, and once more when it is known what its steps take."""
        self.profile_to_keep = self.profile_used
        if self._rank == 0 and self._kept is not None and self._is_to_keep and self.profile_used is not None:
            self._kept.write(self.profile_used)

    def _profile_of_plan(self) -> StepProfile:
        """What the plan that stays was made from."""
        made_from = self._chosen.candidate.config.cluster
        assert self.profile is not None
        return made_from if isinstance(made_from, StepProfile) else self.profile

    # A plan stays as long as steps keep their pace.

    def _stay(self, step_seconds: float, usual: float = 0.0) -> None:
        """Let the chosen plan run. step_seconds: what its step takes. usual: as `Pace` takes it."""
        calm, before = 0.0, self._before
        if before is not None:
            stays = before.candidate.name == self._chosen.candidate.name
            calm = self._calm = 2 * self._calm if stays else CALM_SECONDS
        self.is_settled, self._before = True, None
        self._pace = Pace(step_seconds, calm, usual)
        self.clock.next_at(self._pace.window, self._look_at_pace)

    def _give_up(self, why: str) -> None:
        """Run what was asked for as it is planned with assumed figures; with schedule="auto" that is the default."""
        log.info("no plan is made of what was measured: %s", why)
        self._measured.release()
        self._is_measuring = False
        self._chosen, self.is_settled = ChosenPlan(self._planner), True
        self._planner.plan_as(self._preset)

    def _look_at_pace(self) -> None:
        pace, clock = self._pace, self.clock
        assert pace is not None, "a plan has been chosen"
        mine = median(clock.times) if 2 * len(clock.times) > pace.window else None
        everybody = clock.meet(mine)
        change = ""
        if None not in everybody:
            self._step_seconds = max(everybody)
            change = pace.change(self._step_seconds)
            self._keep()
            self._is_to_keep = False
        if not change:
            clock.next_at(pace.window, self._look_at_pace)
            return
        log.info("measuring again: %s", change)
        self._is_known = False
        self.is_settled, self._before, self._budget = False, self._chosen, self._whole_budget()
        self._measure()

    def _is_slow_alone(self, seconds: Sequence[float]) -> bool:
        """Name ranks that compute longer than the others. Whether nothing else has changed since plans were made."""
        slow, usual = slow_ranks(seconds), median_low(seconds)
        for rank in slow:  # some steps alone may have been disturbed
            log.info("rank %d computes %.2f times as long as others", rank, seconds[rank] / usual)
        return bool(slow) and self._before is not None and usual <= CHANGED * self._computed


def _lines(tried: Mapping[str, str]) -> str:
    """A line for each plan."""
    return "\n".join(f"  {name}: {times}" for name, times in tried.items())
