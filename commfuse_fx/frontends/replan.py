"""A step that measures itself while it trains, tries other plans, and goes on with the one that measures fastest.

All ranks do the same at the same step: what follows from measurements follows from those of all ranks, which they
exchange between two steps, after a vote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import ceil
from statistics import median
from time import perf_counter
from typing import Any

import torch

from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.cost.priced import model_fingerprint
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

TURN_SECONDS, FEWEST, MOST = 0.4, 4, 20
"""A turn of a plan takes about so many seconds, and so many steps at least and at most, besides its first one."""

SPENT = 30.0
"""Seconds that all of this may take longer than training by default: 5% of the first ten minutes."""


class Replan:
    """Decides which plan runs in place of the default one of a call.

    is_settled: whether the plan that runs stays. profile: what was measured of network and nodes; None until then.
    """

    def __init__(self, planner: Planner, voting: Voting, asked: CompileConfig, rank: int) -> None:
        planner.keeps_captured = True
        self._asked = asked
        self._rank = rank
        self.is_settled = False
        self.profile: StepProfile | None = None
        self._planner = planner
        self._voting = voting
        self._device = next((param.device for param in planner.model.parameters()), torch.device("cpu"))
        self._is_paused = False
        self._spent = 0.0
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        self._attempts = 0
        self._runner: Runner | None = None  # of the last training step
        self._candidates: list[Candidate] = []
        self._trials: Trials | None = None
        self._running = 0
        self._times: list[float] = []
        self._last: tuple[Plan, float] | None = None
        self._kept: KeptPlans | None = None
        self._is_known = False  # a plan of an earlier run is tried, and nothing is measured
        self._measure(WARM)
        self._due = 1

    def _measure(self, warm: int) -> None:
        self._trials, self._candidates, self._running = None, [], 0
        self._steps_measured = MeasuredSteps(self._voting)
        self._from, self._due = self._steps + warm, self._steps + warm + ROUNDS

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
        if self.is_settled or self._is_paused or self._steps != self._due:
            return
        if self._kept is None:
            self._go_on_as_kept()
        elif self._trials is None:
            self._plan_from_measured()
        else:
            self._end_turn(self._trials)

    def chosen(self, plan: Plan) -> Plan:
        """The plan that runs in place of the default plan of a call."""
        if self._running == 0 or not plan.compiled.program.training:
            return plan
        is_base = plan is self._steps_measured.plan
        if not (is_base or self.is_settled):
            return plan
        candidate = self._candidates[self._running]
        key = (f"as {candidate.name}", ())
        if key not in plan.others:
            compiled = candidate.compiled
            if not is_base:
                compiled = self._planner.planned_as(plan.compiled, candidate.config)
            plan.others[key] = Plan(compiled, plan.signature, plan.guards)
        return plan.others[key]

    def shown(self, compiled: Compiled) -> Compiled:
        """What stays in place of a default plan, once that is known."""
        if not (self.is_settled and self._running and compiled.program.training):
            return compiled
        chosen, base = self._candidates[self._running], self._steps_measured.plan
        if base is not None and compiled is base.compiled:
            return chosen.compiled
        return self._planner.planned_as(compiled, chosen.config)

    def measures(self, plan: Plan, runner: Runner) -> bool:
        """Whether a step of this plan is to be run by `run_measured`."""
        if self.is_settled or self._is_paused or self._trials is not None or self._steps < self._from:
            return False
        return self._steps_measured.wants(plan, runner)

    def run_measured(self, runner: Runner, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """A training step. Returns what `Executor.run` does."""
        return self._steps_measured.run(runner, inputs)

    def after_step(self, plan: Plan, runner: Runner) -> None:
        """After a step that ran this plan."""
        if self.is_settled or self._is_paused or not plan.compiled.program.training:
            return
        self._steps += 1
        self._runner = runner
        if self._steps == self._due:
            synchronize(self._device)
        now = perf_counter()
        if self._trials is not None and self._last is not None and self._last[0] is plan:
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
        self._kept = plans
        if kept is None:
            self._measure(WARM)
            return
        self.profile, self._steps_measured.plan = kept.profile, base
        self._candidates = [each for each in self._planned(kept.profile) if each.name in (DEFAULT, kept.plan)]
        self._is_known = kept.plan in [each.name for each in self._candidates]
        if not self._is_known:
            self._measure(WARM)
            return
        self._trials = Trials([each.name for each in self._candidates])
        log.info("an earlier run has come to plan %s, which is tried first", kept.plan)
        self._go_on(self._trials)

    # Plans follow from what the nodes take and what the network takes.

    def _plan_from_measured(self) -> None:
        everybody = self._meet(self._steps_measured.seconds())
        if any(each is None or each.keys() != everybody[0].keys() for each in everybody):
            self._attempts += 1
            if self._attempts == ATTEMPTS:
                self._settle(0, "batches have other shapes too often, so nothing was measured")
            else:
                self._measure(0)
            return
        began = perf_counter()
        seconds = {key: median(each[key] for each in everybody) for key in everybody[0]}
        self.profile = self._profile_of(seconds)
        self._candidates = worth_a_trial(self._planned(self.profile))
        self._spent += self._steps_measured.spent + perf_counter() - began
        self._trials = Trials([each.name for each in self._candidates])
        log.info("%s", table("plans by what was measured", self._candidates, self._trials))
        self._go_on(self._trials)

    def _profile_of(self, seconds: Mapping[str, float]) -> StepProfile:
        planner = self._planner
        figures = default_cluster(self._device.type, planner.mesh.world).device
        return StepProfile(
            cluster=measured_cluster(self._device, NETWORK_SECONDS, figures),
            world=planner.mesh.world,
            model=model_fingerprint(planner.watch.params),
            node_seconds=seconds,
            torch=torch.__version__,
            device=figures.name,
        )

    def _planned(self, profile: StepProfile) -> list[Candidate]:
        """The default, and all other plans of which every rank makes the same."""
        base = self._steps_measured.plan
        assert base is not None
        found = candidates(self._planner, self._asked, base.compiled, profile)
        everybody = self._meet([hash62(communication_text(each.compiled.program)) for each in found])
        return [each for number, each in enumerate(found) if len({rank[number] for rank in everybody}) == 1]

    # Plans take turns.

    def _go_on(self, trials: Trials) -> None:
        if trials.is_over:
            if self._is_known and self._candidates[trials.winner].name != self._candidates[-1].name:
                log.info("plan %s is no longer faster: measuring anew", self._candidates[-1].name)
                self._is_known = False
                self._measure(0)
            else:
                self._settle(trials.winner)
            return
        self._running, self._times, self._last = trials.next, [], None
        step = trials.seconds(0) or self._candidates[0].predicted
        count = min(max(ceil(TURN_SECONDS / max(step, 1e-6)), FEWEST), MOST)
        self._due = self._steps + count + 1  # the first one moves parameters

    def _end_turn(self, trials: Trials) -> None:
        mine = median(self._times) if len(self._times) >= FEWEST - 1 else None
        everybody = self._meet((mine, self._spent))
        if any(seconds is None for seconds, _ in everybody):
            self._attempts += 1
            if self._attempts >= ATTEMPTS * len(self._candidates):
                trials.stop()
        else:
            seconds = max(seconds for seconds, _ in everybody)
            trials.add(seconds)
            self._spent += max(seconds - (trials.seconds(0) or seconds), 0.0) * len(self._times)
            if max(spent for _, spent in everybody) > SPENT:
                trials.stop()
        self._go_on(trials)

    def _settle(self, number: int, why: str = "") -> None:
        self.is_settled = True
        self._running, self._times, self._last = number, [], None
        if self._trials is None:
            log.info("the default plan stays: %s", why)
            return
        chosen = self._candidates[number]
        text = table("plans tried", self._candidates, self._trials)
        log.info("plan %s stays, after %d steps and %.1f s\n%s", chosen.name, self._steps, self._spent, text)
        for each, candidate in enumerate(self._candidates):
            chosen.compiled.program.note("plans tried", candidate.name, candidate.times(self._trials.seconds(each)))
        chosen.compiled.program.note("plans tried", chosen.name, "stays")
        if number:
            self._planner.publish(chosen.compiled)
        if self._rank == 0 and self._kept is not None and self.profile is not None and not self._is_known:
            self._kept.write(KeptPlan(plan=chosen.name, profile=self.profile))
        if (base := self._steps_measured.plan) is not None:
            base.others = {key: plan for key, plan in base.others.items() if key[0] == f"as {chosen.name}"}
        # The programs of the others may go.
        self._candidates = [self._candidates[0], chosen] if number else [chosen]
        self._running = min(number, 1)
