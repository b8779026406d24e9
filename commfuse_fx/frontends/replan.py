"""A step that measures itself while it trains, tries other plans, and goes on with the one that measures fastest.

All ranks do the same at the same step: what follows from measurements follows from those of all ranks, which they
exchange between two steps, after a vote. Nothing has changed on any rank if that vote fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from statistics import median, median_low
from time import perf_counter
from typing import Any

import torch

from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.cost.priced import model_fingerprint
from commfuse_fx.frontends.chosen_plan import ChosenPlan
from commfuse_fx.frontends.measured_steps import ROUNDS, MeasuredSteps
from commfuse_fx.frontends.runners import Runner
from commfuse_fx.frontends.voting import Voting
from commfuse_fx.ir.text import communication_text
from commfuse_fx.machine.kept_plan import KeptPlan
from commfuse_fx.machine.source import default_cluster
from commfuse_fx.machine.step_profile import StepProfile
from commfuse_fx.measure.calibration import measured_cluster
from commfuse_fx.measure.probe import device_name, synchronize
from commfuse_fx.planning.alternatives import DEFAULT, Candidate, candidates, table, worth_a_trial
from commfuse_fx.planning.compiled import Compiled
from commfuse_fx.planning.kept_plans import KeptPlans
from commfuse_fx.planning.pace import CALM_SECONDS, CHANGED, Pace, slow_ranks
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.planning.planner import Planner
from commfuse_fx.planning.trials import Trials
from commfuse_fx.runtime.ranks.ballots import hash62
from commfuse_fx.support.logs import logger

log = logger("plan")

WARM = 2
"""Training steps before the first one that is measured."""

ATTEMPTS = 3
"""How often nodes are measured anew, where a rank had other batches."""

NETWORK_SECONDS = 2.0
"""How long the network is measured, about."""

TURN_SECONDS, FEWEST, MOST = 0.4, 4, 60
"""A turn of a plan takes about so many seconds, and so many steps at least and at most, besides its first one."""

SPENT = 30.0
"""Seconds that all of this may take longer than training by default: 5% of the first ten minutes."""


class Replan:
    """Decides which plan runs in place of the default one of a call.

    asked: what the user has asked for. is_settled: whether the plan that runs stays. profile: what was measured of
    network and nodes; None until then.
    """

    def __init__(self, planner: Planner, voting: Voting, asked: CompileConfig, rank: int) -> None:
        planner.keeps_captured = True
        self.is_settled = False
        self.profile: StepProfile | None = None
        self._planner = planner
        self._voting = voting
        self._asked = asked
        self._rank = rank
        self._device = next((param.device for param in planner.model.parameters()), torch.device("cpu"))
        self._is_paused = False
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        self._times: list[float] = []
        self._last: tuple[Plan, float] | None = None
        self._runner: Runner | None = None  # of the last training step
        self._kept: KeptPlans | None = None
        self._is_known = False  # whether a plan of an earlier run is tried, and nothing is measured
        self._pace: Pace | None = None  # of the plan that stays
        self._before: ChosenPlan | None = None  # what ran when the pace changed
        self._step_seconds = 0.0  # when the pace was last looked at
        self._calm = CALM_SECONDS / 2
        self._spent = 0.0
        self._attempts = 0
        self._measure(WARM)
        self._next_at(1, self._go_on_as_kept)

    def _next_at(self, steps: int, decide: Callable[[], None]) -> None:
        """Let all ranks make a decision after so many more steps. No more steps are timed until then than those."""
        self._due, self._decide, self._times, self._last = self._steps + steps, decide, [], None

    # What the session asks and tells.

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Steps inside of the block do not count, and the plan that runs stays."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def restart(self) -> None:
        """Plans that were measured are gone: begin anew. All ranks do."""
        if not self.is_settled:
            self._begin()

    def before_step(self) -> None:
        """Before a training step. Where a decision is due, all ranks make it together."""
        if self._steps == self._due and not self._is_paused:
            self._decide()

    def chosen(self, plan: Plan) -> Plan:
        """The plan that runs in place of the default plan of a call."""
        return self._chosen.of(plan)

    def shown(self, compiled: Compiled) -> Compiled:
        """What stays in place of a default plan, once that is known."""
        return self._chosen.shown(compiled)

    def measures(self, plan: Plan, runner: Runner) -> bool:
        """Whether a step of this plan is to be run by `run_measured`."""
        is_time = self._trials is None and not self.is_settled and self._steps >= self._from
        return is_time and not self._is_paused and self._measured.wants(plan, runner)

    def run_measured(self, runner: Runner, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """A training step. Returns what `Executor.run` does."""
        return self._measured.run(runner, inputs)

    def after_step(self, plan: Plan, runner: Runner) -> None:
        """After a step that ran this plan."""
        if self._is_paused or not plan.compiled.program.training:
            return
        self._steps += 1
        self._runner = runner
        if self._steps == self._due:
            synchronize(self._device)
        now = perf_counter()
        if self._steps <= self._due and self._last is not None and self._last[0] is plan:
            self._times.append(now - self._last[1])
        self._last = (plan, now)

    def _meet(self, mine: Any) -> list[Any]:
        assert self._runner is not None, "a step has run"
        return self._voting.meet(self._runner, mine)

    # An earlier run of the same step has left its plan.

    def _go_on_as_kept(self) -> None:
        assert self._last is not None, "a step has run"
        base, planner = self._last[0], self._planner
        assert base.compiled.captured is not None
        plans = KeptPlans(base.compiled.captured, self._asked, device_name(self._device))
        world, model = planner.mesh.world, model_fingerprint(planner.watch.params)
        kept = self._meet(plans.read(world, model) if self._rank == 0 else None)[0]
        found = [] if kept is None else self._planned(base, kept.profile)
        self._kept = plans
        if kept is None or kept.plan not in [each.name for each in found]:
            self._measure(WARM)
            return
        log.info("an earlier run has come to plan %s, which is tried first", kept.plan)
        self.profile, self._is_known = kept.profile, True
        self._try(base, [each for each in found if each.name in (DEFAULT, kept.plan)])

    # Plans follow from what the nodes take and what the network takes.

    def _measure(self, warm: int) -> None:
        """Run the default plan, and measure its steps after so many others."""
        self._chosen = ChosenPlan(self._planner)
        self._trials: Trials | None = None
        self._measured = MeasuredSteps(self._voting)
        self._from = self._steps + warm
        self._next_at(warm + ROUNDS, self._plan_from_measured)

    def _plan_from_measured(self) -> None:
        everybody = self._meet(self._measured.seconds())
        if any(each is None or each.keys() != everybody[0].keys() for each in everybody):
            self._attempts += 1
            if self._attempts < ATTEMPTS:
                self._measure(0)
            else:
                self._stay_as_before("batches have other shapes too often, so nothing was measured")
            return
        began = perf_counter()
        if self._is_slow_alone([sum(each.values()) for each in everybody]):
            self._stay_as_before("the other ranks are as fast as before")
            return
        base = self._measured.plan
        assert base is not None
        profile = self._profile_of({key: median(each[key] for each in everybody) for key in everybody[0]})
        found = worth_a_trial(self._planned(base, profile))
        if self._before is not None and self._before.number:
            before = self._before.candidate
            found.append(replace(before, name=f"{before.name.removesuffix(AS_BEFORE)}{AS_BEFORE}"))
        self.profile = profile
        self._spent += self._measured.spent + perf_counter() - began
        self._try(base, found)
        log.info("%s", table("plans by what was measured", found, Trials([])))

    def _profile_of(self, seconds: Mapping[str, float]) -> StepProfile:
        world = self._planner.mesh.world
        figures = default_cluster(self._device.type, world).device
        return StepProfile(
            cluster=measured_cluster(self._device, NETWORK_SECONDS, figures),
            world=world,
            model=model_fingerprint(self._planner.watch.params),
            node_seconds=seconds,
            torch=torch.__version__,
            device=figures.name,
        )

    def _planned(self, base: Plan, profile: StepProfile) -> list[Candidate]:
        """The default, and all other plans of which every rank makes the same."""
        found = candidates(self._planner, self._asked, base.compiled, profile)
        everybody = self._meet([hash62(communication_text(each.compiled.program)) for each in found])
        return [each for number, each in enumerate(found) if len({rank[number] for rank in everybody}) == 1]

    # Plans take turns.

    def _try(self, base: Plan, found: Sequence[Candidate]) -> None:
        self._chosen = ChosenPlan(self._planner, base, found)
        self._trials = Trials([each.name for each in found])
        self._go_on(self._trials)

    def _go_on(self, trials: Trials) -> None:
        self._chosen.number = trials.next
        if trials.is_over:
            self._settle(trials)
            return
        step = trials.seconds(0) or self._chosen.candidates[0].predicted
        count = min(max(ceil(TURN_SECONDS / max(step, 1e-6)), FEWEST), MOST)
        self._next_at(count + 1, self._end_turn)  # the first one moves parameters

    def _end_turn(self) -> None:
        trials = self._trials
        assert trials is not None
        mine = median(self._times) if len(self._times) >= FEWEST - 1 else None
        count = len(self._times)
        everybody = self._meet((mine, self._spent))
        if any(seconds is None for seconds, _ in everybody):
            self._attempts += 1
            if self._attempts >= ATTEMPTS * len(trials.names):
                trials.stop()
        else:
            seconds = max(seconds for seconds, _ in everybody)
            trials.add(seconds)
            self._spent += max(seconds - (trials.seconds(0) or seconds), 0.0) * count
            if max(spent for _, spent in everybody) > SPENT:
                trials.stop()
        self._go_on(trials)

    def _settle(self, trials: Trials) -> None:
        name, known = self._chosen.candidate.name, self._chosen.candidates[-1].name
        if self._is_known and name != known:
            log.info("plan %s is no longer faster: measuring anew", known)
            self._is_known = False
            self._measure(0)
            return
        text = self._chosen.stays(trials)
        log.info("plan %s stays, after %d steps and %.1f s\n%s", name, self._steps, self._spent, text)
        if self._rank == 0 and self._kept is not None and self.profile is not None and not self._is_known:
            self._kept.write(KeptPlan(plan=name.removesuffix(AS_BEFORE), profile=self.profile))
        self._stay(trials.seconds(trials.winner) or self._chosen.candidate.predicted)

    # A plan stays as long as steps keep their pace.

    def _stay(self, step_seconds: float) -> None:
        """Let the chosen plan run. step_seconds: what its step takes."""
        calm, before = 0.0, self._before
        if before is not None:
            stays = before.candidate.name.removesuffix(AS_BEFORE) == self._chosen.candidate.name.removesuffix(AS_BEFORE)
            calm = self._calm = 2 * self._calm if stays else CALM_SECONDS
        self.is_settled, self._before, self._spent, self._attempts = True, None, 0.0, 0
        self._pace = Pace(step_seconds, calm)
        self._next_at(self._pace.window, self._look_at_pace)

    def _stay_as_before(self, why: str) -> None:
        """Run the plan that ran before nodes were measured: at first that is the default."""
        log.info("no other plan is made: %s", why)
        if self._before is None:
            self._chosen, self.is_settled = ChosenPlan(self._planner), True
        else:
            self._chosen = self._before
            self._stay(self._step_seconds)

    def _look_at_pace(self) -> None:
        assert self._pace is not None, "a plan has been chosen"
        mine = median(self._times) if 2 * len(self._times) > self._pace.window else None
        everybody = self._meet(mine)
        change = ""
        if None not in everybody:
            self._step_seconds = max(everybody)
            change = self._pace.change(self._step_seconds)
        if not change:
            self._next_at(self._pace.window, self._look_at_pace)
            return
        log.info("measuring again: %s", change)
        self.is_settled, self._before = False, self._chosen
        self._measure(0)

    def _is_slow_alone(self, seconds: Sequence[float]) -> bool:
        """Name ranks that compute longer than the others. Whether nothing else has changed since plans were made."""
        slow, usual = slow_ranks(seconds), median_low(seconds)
        for rank in slow:  # some steps alone may have been disturbed
            log.info("rank %d computes %.2f times as long as others", rank, seconds[rank] / usual)
        if not slow or self._before is None or self.profile is None:
            return False
        known = self.profile.node_seconds
        return usual <= CHANGED * sum(known.get(key, 0.0) for key in self._measured.keys)


AS_BEFORE = ", as before"
"""Behind the name of the plan that ran when the pace changed."""
