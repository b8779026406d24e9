"""Plans of a step that follow from what was measured on all ranks, the same on each of them.

Why: docs/decisions.md, "What is tried costs little: no CUDA graph, no compile, three plans the second time".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.cost.priced import model_fingerprint
from commfuse_fx.ir.text.write_text import communication_text
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.machine.cluster_parts import Device
from commfuse_fx.machine.source import cluster_of, default_cluster
from commfuse_fx.machine.step_profile import StepProfile
from commfuse_fx.measure.calibration import measured_cluster
from commfuse_fx.measure.probe import device_name
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.planning.planner import Planner
from commfuse_fx.runtime.execute.inductor.inductor import regions_to_compile
from commfuse_fx.runtime.ranks.ballots import hash62
from commfuse_fx.support.logs import logger
from commfuse_fx.trials.alternatives import DEFAULT, Candidate, candidates, untried
from commfuse_fx.trials.chosen_plan import ChosenPlan, FoundPlans, prices
from commfuse_fx.trials.correction import corrected
from commfuse_fx.trials.kept_plans import KeptPlans
from commfuse_fx.trials.step_clock import StepClock
from commfuse_fx.trials.trial_order import Trials

log = logger("plan")

NETWORK_SECONDS = 2.0
"""How long the network is measured, about."""

CORRECTED = "corrected"
"""Remark on plans that follow from what trials have taught."""


class MeasuredPlans:
    """Makes the plans that are tried.

    asked: what the user has asked for. clock: all ranks know alike whether it counts steps of several sizes.
    """

    def __init__(self, planner: Planner, asked: CompileConfig, clock: StepClock, device: torch.device) -> None:
        self._planner = planner
        self._asked = asked
        self._clock = clock
        self._device = device

    def pays_after(self, seconds: float) -> bool:
        """Whether to measure for plans, after so much training."""
        return seconds >= NETWORK_SECONDS

    def fits(self, seconds: float) -> bool:
        """Whether all of it may be measured in so much time."""
        return seconds >= NETWORK_SECONDS

    def profile(self, seconds: Mapping[str, float]) -> StepProfile:
        """What the nodes take, as measured, with a network as given, or as measured now by all ranks together.

        The network of a profile with a plan was measured by an earlier run, and no longer holds where this is called.
        """
        world, given = self._planner.mesh.world, self._asked.figures
        if isinstance(given, StepProfile) and given.plan:
            given = None
        figures = default_cluster(self._device.type, world).device
        return StepProfile(
            cluster=self._measured_cluster(figures) if given is None else cluster_of(given),
            world=world,
            model=model_fingerprint(self._planner.watch.params),
            node_seconds=seconds,
            torch=torch.__version__,
            device=figures.name,
        )

    def _measured_cluster(self, figures: Device) -> ClusterSpec:
        with self._clock.outside_of_steps("measuring the network") as heed:
            return measured_cluster(self._device, NETWORK_SECONDS, figures, heed)

    def of(self, base: Plan, profile: StepProfile) -> FoundPlans:
        """The default, and all other plans of which every rank makes the same. All ranks come here.

        Where the user leaves all free, no plan is tried that Inductor would have to compile for.
        """
        common = self._clock.meet(prices(base, profile))[0] if self._clock.is_mixed else None
        found = candidates(self._planner, self._asked, base.compiled, profile, common)
        everybody = self._clock.meet([self._vote_on(each) for each in found])
        votes = [{rank[number] for rank in everybody} for number in range(len(found))]
        alike = [each for each, vote in zip(found, votes, strict=True) if len(vote) == 1 and None not in vote]
        return FoundPlans(alike, base, profile, common)

    def _vote_on(self, candidate: Candidate) -> int | None:
        """What ranks have to agree on; None if this one does not try the plan."""
        program = candidate.compiled.program
        if self._asked.is_auto and candidate.name != DEFAULT and (count := regions_to_compile(program)):
            log.info("plan %s is not tried: Inductor would have to compile %d regions", candidate.label, count)
            return None
        return hash62(communication_text(program))

    def taught(self, chosen: ChosenPlan, trials: Trials) -> FoundPlans | None:
        """The default, the fastest plan, and others that follow from what trials have taught; None without these."""
        plans = chosen.found
        assert plans is not None, "the plans that were tried"
        pairs = [(each.compiled.program, trials.seconds(number)) for number, each in enumerate(chosen.candidates)]
        tried = [(program, seconds) for program, seconds in pairs if seconds is not None]
        profile = corrected(plans.profile, tried) if len(tried) > 1 else plans.profile
        if profile is plans.profile:
            return None
        more = untried(self.of(plans.base, profile).candidates, chosen.candidates, profile)
        log.info("the trials have taught what the network takes; plans that follow from it: %d", len(more))
        best = chosen.candidate
        kept = [best] if best is chosen.candidates[0] else [chosen.candidates[0], best]
        more = [replace(each, remark=CORRECTED) for each in more]
        return replace(plans, candidates=[*kept, *more]) if more else None

    def kept(self, base: Plan) -> KeptPlans:
        """Where plans of earlier runs of this step are kept."""
        assert base.compiled.captured is not None
        return KeptPlans(base.compiled.captured, self._asked, device_name(self._device))

    def read(self, kept: KeptPlans) -> StepProfile | None:
        """What an earlier run of this step has left."""
        return kept.read(self._planner.mesh.world, model_fingerprint(self._planner.watch.params))
