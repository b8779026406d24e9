"""Other plans of a step that has been measured: which ones there are, and which are worth a trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from commfuse_fx.config.compile_config import CompileConfig, FusionConfig, KindFusion, ScheduleConfig
from commfuse_fx.cost.model import CostModel
from commfuse_fx.cost.numbers import in_ms
from commfuse_fx.errors import CommFuseError
from commfuse_fx.ir.text.write_text import canonical_text
from commfuse_fx.machine.step_profile import StepProfile
from commfuse_fx.planning.compiled import Compiled
from commfuse_fx.planning.planner import Planner
from commfuse_fx.planning.variants.shared_prices import Seconds
from commfuse_fx.support.logs import logger
from commfuse_fx.trials.correction import step_seconds
from commfuse_fx.trials.trial_order import CLEARLY

log = logger("plan")

DEFAULT = "default"

SIZES = (1, 4, 25)
"""Buckets in MiB that are offered besides those that prices decide. The default has 64."""

MOST = 4
"""Plans that are tried, the default among them."""

PROMISING = 1.05
"""A plan is tried if its predicted step takes at most so much of the fastest one's."""


def alternatives(
    asked: CompileConfig, first: CompileConfig, profile: StepProfile, form: str
) -> Mapping[str, CompileConfig]:
    """What there is besides the first plan, by name.

    asked: what the user has asked for. `comm_fusion` and a memory limit are kept; schedule="auto" leaves the rest free.
    form: "step", or "module", whose updates are the caller's.
    """
    found: dict[str, CompileConfig] = {}
    planned = replace(first, comm_fusion=asked.comm_fusion, cluster=profile)
    if asked.is_auto and not asked.comm_fusion.is_given:
        planned = replace(planned, comm_fusion=_allreduce(KindFusion("optimal")))
        for size in SIZES:
            found[f"size {size}"] = replace(first, comm_fusion=_allreduce(KindFusion("size", size)))
    by_cost = {"optimal" if planned.comm_fusion.is_optimal else "planned": planned}
    if form == "step" and asked.tries_across_steps:
        across = ScheduleConfig(memory_limit=asked.memory_limit, across_steps=True)
        by_cost["across steps"] = replace(planned, schedule=across)
    return by_cost | found


def as_kept(asked: CompileConfig, first: CompileConfig, form: str) -> CompileConfig:
    """The plan for schedule="auto" whose name the given profile has, where no plan is tried; else the first one."""
    profile = asked.figures
    if not asked.is_auto or not isinstance(profile, StepProfile):
        return first
    return alternatives(asked, first, profile, form).get(profile.plan, first)


def _allreduce(fusion: KindFusion) -> FusionConfig:
    return FusionConfig(allreduce=fusion)


@dataclass(frozen=True)
class Candidate:
    """A plan to try.

    name: among the alternatives. predicted: seconds of its step. remark: tells it from another one of that name.
    """

    name: str
    config: CompileConfig
    compiled: Compiled
    predicted: float
    remark: str = ""

    @property
    def label(self) -> str:
        """Its name for people."""
        return f"{self.name}, {self.remark}" if self.remark else self.name

    def times(self, measured: float | None) -> str:
        """What its step takes, in words."""
        text = "" if measured is None else f", measured {in_ms(measured)}"
        return f"predicted {in_ms(self.predicted)}{text}"


def candidates(
    planner: Planner, asked: CompileConfig, base: Compiled, profile: StepProfile, common: Seconds | None = None
) -> list[Candidate]:
    """The first plan of a call, and all others that there are, with what their steps take by a profile.

    common: as in `Planner.planned_as`.
    """
    costs = CostModel(profile.cluster, profile.node_seconds)
    found = [Candidate(DEFAULT, planner.config, base, step_seconds(base.program, costs))]
    for name, config in alternatives(asked, planner.config, profile, planner.form).items():
        try:
            compiled = planner.planned_as(base, config, common)
        except CommFuseError as error:
            log.info("plan %s is not tried: %s", name, error)
            continue
        found.append(Candidate(name, config, compiled, step_seconds(compiled.program, costs)))
    return found


def worth_a_trial(found: Sequence[Candidate], most: int | None = None) -> list[Candidate]:
    """The default, which stands first, and those of the others that may be faster: a few, the most promising first.

    most: how many, the default among them; None: MOST. Plans that are the same but for their names count once.
    """
    first, *others = found
    distinct: dict[str, Candidate] = {}
    for each in [first, *sorted(others, key=lambda each: each.predicted)]:
        distinct.setdefault(text_of(each), each)
    best = min(each.predicted for each in distinct.values())
    rivals = [each for each in distinct.values() if each is not first and each.predicted <= PROMISING * best]
    return [first, *rivals[: (most or MOST) - 1]]


def untried(found: Sequence[Candidate], tried: Sequence[Candidate], profile: StepProfile) -> list[Candidate]:
    """Those of some plans that have not been tried and are predicted to be clearly faster, by this profile, than those
    that have."""
    costs, known = CostModel(profile.cluster, profile.node_seconds), {text_of(each) for each in tried}
    best = min(step_seconds(each.compiled.program, costs) for each in tried)
    faster = [each for each in found if text_of(each) not in known and each.predicted < CLEARLY * best]
    return sorted(faster, key=lambda each: each.predicted)[: MOST - 1]


def text_of(candidate: Candidate) -> str:
    """The text of its program, without the options that led to it."""
    text = canonical_text(candidate.compiled.program)
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))
