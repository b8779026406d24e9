"""Which steps try plans, for how long, what they keep for the next run, and when they try again."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.trials import measured_plans, pace, replan
from commfuse_fx.trials.correction import slower
from commfuse_fx.trials.measured_plans import MeasuredPlans
from commfuse_fx.trials.measured_steps import MeasuredSteps
from tests.distributed.harness import Ranks
from tests.distributed.models_of_ranks import adamw, wide_mlp, xy
from tests.distributed.quick_trials import quickly
from tests.distributed.step_twins import Twins
from tests.logs import logged

pytestmark = pytest.mark.dist


def keeps_its_plan(how: str) -> bool:
    torch.use_deterministic_algorithms(how == "deterministic")
    try:
        step = cf.compile(
            wide_mlp(), loss_fn=F.cross_entropy, schedule="auto", **({"replan": False} if how == "replan" else {})
        )
    finally:
        torch.use_deterministic_algorithms(False)
    step(*xy(0))
    return step.session.replan is None


PLANNED: dict[str, Any] = {"comm_fusion": {"allreduce": {"mode": "optimal", "config": None}}}


def buckets(text: str) -> list[str]:
    return [line for line in text.splitlines() if "all_reduce" in line and not line.startswith("#")]


def measures_by_default() -> list[bool]:
    """Whether a step tries plans; and whether it shows the plan by preset figures before, the running one after."""
    found = []
    for options in ({}, {"cluster": "default", **PLANNED}, {"cluster": "gloo-1gbit", **PLANNED}, PLANNED):
        step = cf.compile(wide_mlp(), loss_fn=F.cross_entropy, **options)
        found.append(step.session.replan is not None)
    with quickly("default"):
        twins = Twins(PLANNED)
        model = wide_mlp()
        options = {"optimizer": adamw(model), "cluster": "default", **PLANNED}
        preset = cf.compile(model, loss_fn=F.cross_entropy, **options)
        twins.run()
        shown = twins.step.lower(*xy(0)).text()
        twins.settle()
        after = twins.step.lower(*xy(0)).text()
    default = twins.plain.lower(*xy(0)).text()
    return [*found, buckets(shown) == buckets(preset.lower(*xy(0)).text()), buckets(after) == buckets(default)]


def test_plans_by_cost_are_measured_where_no_figures_are_given(ranks: Ranks) -> None:
    assert ranks.values(measures_by_default) == 2 * [[False, False, False, True, True, True]]


def goes_on_with_a_profile(replans: bool) -> tuple[str, list[str], str]:
    """A checkpoint holds the profile: the plan of the first run, what the second one tries, and what it runs."""
    with quickly("size 1"):
        twins = Twins()
        twins.settle()
        text = twins.step.profile_used().to_json()
        profile = cf.StepProfile.from_json(text)
        options = {"schedule": "auto", "cluster": profile, "replan": replans}
        if not replans:
            model = wide_mlp()
            step = cf.compile(model, loss_fn=F.cross_entropy, optimizer=adamw(model), **options)
            assert step.session.replan is None
            fused = [each.bytes for each in step.lower(*xy(0)).collectives]
            return profile.plan, [], str(fused == [each.bytes for each in twins.step.lower(*xy(0)).collectives])
        with patch.object(MeasuredSteps, "run", side_effect=AssertionError("nothing is measured")):
            other = Twins(options)
            other.settle()
            other.check()
    return profile.plan, other.tried(), other.step.profile_used().plan


def test_a_profile_with_a_plan_goes_on_where_a_run_has_ended(ranks: Ranks) -> None:
    one, other = ranks.values(goes_on_with_a_profile, True)
    assert one == other == ("size 1", ["default", "size 1", "size 1 stays"], "size 1")
    one, other = ranks.values(goes_on_with_a_profile, False)
    assert one == other == ("size 1", [], "True")


def predicts_by_what_was_measured() -> list[bool]:
    with quickly("default"):
        twins = Twins()
        twins.settle()
    lowered, profile = twins.step.lower(*xy(0)), twins.step.profile_used()
    again = twins.step.profile(*xy(0), rounds=1)
    return [
        lowered.simulate().step_seconds == lowered.simulate(profile).step_seconds,
        lowered.explain().cluster.startswith("profile gloo-2 "),
        again.cluster == profile.cluster,
    ]


def test_a_default_that_stays_is_explained_by_what_was_measured(ranks: Ranks) -> None:
    assert ranks.values(predicts_by_what_was_measured) == 2 * [[True, True, True]]


def with_a_given_network() -> tuple[str, list[str]]:
    with quickly("default"), patch.object(measured_plans, "measured_cluster", side_effect=AssertionError):
        twins = Twins({"schedule": "auto", "cluster": "gloo-1gbit"})
        twins.settle()
        twins.check()
    return twins.step.profile_used().cluster.name, twins.tried()


def test_a_network_that_is_given_is_not_measured(ranks: Ranks) -> None:
    one, other = ranks.values(with_a_given_network)
    assert one == other and one[0] == "gloo-1gbit" and len(one[1]) > 2


def ends_at_limits(limits: cf.TrialLimits) -> tuple[int, list[str], list[bool]]:
    """The number of steps, what stays, and whether it was measured."""
    with quickly(), logged() as messages:
        twins = Twins({"schedule": "auto", "replan": limits})
        twins.settle()
        twins.check()
    return twins.number, twins.tried(), [" measured " in each for each in messages if " stays, after" in each]


def test_trials_end_at_the_limit_of_steps(ranks: Ranks) -> None:
    one, other = ranks.values(ends_at_limits, cf.TrialLimits(steps=30))
    assert one == other and one[0] <= 3 + 30 + 3 and one[1][-1] == "default stays" and one[2] == [True]


def test_no_plan_is_tried_when_making_plans_has_taken_all_the_time(ranks: Ranks) -> None:
    one, other = ranks.values(ends_at_limits, cf.TrialLimits(seconds=0.051))  # of which the network takes 0.05
    assert one == other and one[1][-1] == "default stays" and one[2] == [False]


def measures_nothing() -> tuple[list[str], bool]:
    with quickly(), logged() as messages, patch.object(MeasuredPlans, "profile", side_effect=AssertionError):
        twins = Twins({"schedule": "auto", "replan": cf.TrialLimits(seconds=0.04)})
        twins.settle()
        twins.check()
    return [each for each in messages if "TrialLimits" in each], twins.step.profile_used() is None


def test_a_limit_that_is_shorter_than_measuring_measures_nothing(ranks: Ranks) -> None:
    told = ["no plan is made of what was measured: TrialLimits(seconds=0.04) is less than measuring takes"]
    assert ranks.values(measures_nothing) == [(told, True)] * 2


def begins_late() -> tuple[int, str]:
    """Measuring pays after more steps than the trials may take."""
    with quickly(), logged() as messages:
        twins = Twins({"schedule": "auto", "replan": cf.TrialLimits(steps=60)})
        with patch.object(MeasuredPlans, "pays_after", lambda self, seconds: twins.number > 90):
            twins.settle()
        twins.check()
    return twins.number, next(each for each in messages if " stays, after" in each)


def test_steps_of_the_trials_count_from_where_measuring_begins(ranks: Ranks) -> None:
    for number, said in ranks.values(begins_late):
        assert 90 < number < 170 and said.count("measured ") > 2


def within_limits() -> tuple[list[str], list[str], int | None]:
    atomic = cf.ScheduleConfig(mode="auto", across_steps=False, memory_limit=1 << 30)
    with quickly(), logged() as messages:
        twins = Twins({"schedule": atomic})
        twins.settle()
        twins.check()
    chosen = twins.step.session.replan._chosen.candidate.config
    return twins.tried(), [each for each in messages if "plans by what" in each], chosen.memory_limit


def test_updates_may_be_kept_within_a_step_and_memory_within_a_limit(ranks: Ranks) -> None:
    one, other = ranks.values(within_limits)
    assert one[0] == other[0] and {"default", "optimal", "size 1"} < set(one[0]) and one[2] == 1 << 30
    assert one[1] and not any("across steps" in each for each in [*one[0], *one[1]])


def trains_for_a_moment() -> tuple[list[bool], int]:
    """Whether anything is measured in a short run, and in one that goes on; and after how many steps that is."""
    twins, found = Twins(), []
    for seconds in (1e9, 1e-9):
        measuring = patch.object(measured_plans, "NETWORK_SECONDS", seconds)
        with measuring, patch.object(MeasuredPlans, "fits", lambda self, limit: True):
            while twins.number < 30 or (seconds < 1 and twins.step.profile_used() is None and twins.number < 100):
                twins.run()
        found.append(twins.step.profile_used() is not None)
    return found, twins.number


def test_a_run_that_is_shorter_than_measuring_measures_nothing(ranks: Ranks) -> None:
    one, other = ranks.values(trains_for_a_moment)
    assert one == other == ([False, True], 54)  # looked at after 3, 6, 12, 24, 48 steps


def learns() -> list[str]:
    """The trials teach that the network takes other times, which leads to one more plan."""

    def taught(profile: cf.StepProfile, tried: Any) -> cf.StepProfile:
        return replace(profile, cluster=slower(profile.cluster, 0.5))

    with (
        quickly("size 4"),
        patch.object(measured_plans, "corrected", taught),
        patch.object(measured_plans, "untried", lambda found, *_: [each for each in found if each.name == "size 4"]),
    ):
        twins = Twins()
        twins.settle()
        twins.check()
    return twins.tried()


def test_what_trials_teach_leads_to_more_plans(ranks: Ranks) -> None:
    one, other = ranks.values(learns)
    assert one == other and one[-2:] == ["size 4, corrected", "size 4 stays"]


@pytest.mark.parametrize("how", ["replan", "deterministic"])
def test_a_plan_may_be_kept(ranks: Ranks, how: str) -> None:
    assert ranks.values(keeps_its_plan, how) == [True, True]


def settles_with_a_cache(folder: str, winner: str, **options: Any) -> tuple[list[str], int]:
    with patch.dict(os.environ, COMMFUSE_CACHE=folder), quickly(winner):
        twins = Twins({"schedule": "auto", **options})
        twins.settle()
        twins.check()
    return twins.tried(), twins.number


def test_the_next_run_begins_with_the_plan_of_this_one(ranks: Ranks, tmp_path: Path) -> None:
    first, _ = ranks.values(settles_with_a_cache, str(tmp_path), "across steps")
    (file,) = tmp_path.iterdir()
    one, other = ranks.values(settles_with_a_cache, str(tmp_path), "across steps")
    assert one == other and one[0] == ["default", "across steps", "across steps stays"]
    assert one[1] < first[1] and len(first[0]) > 3
    assert list(tmp_path.iterdir()) == [file]
    again, _ = ranks.values(settles_with_a_cache, str(tmp_path), "default")  # as it is no longer faster
    assert len(again[0]) > 3 and again[0][-1] == "default stays"
    assert ranks.values(settles_with_a_cache, str(tmp_path), "default")[0][0] == ["default", "default stays"]


def settles_in_no_time(folder: str) -> tuple[list[str], int]:
    return settles_with_a_cache(folder, "", replan=cf.TrialLimits(seconds=0.051))


def test_a_plan_that_stays_as_its_time_is_up_is_not_kept(ranks: Ranks, tmp_path: Path) -> None:
    """Nothing is known of the others, which the next run should try."""
    one, other = ranks.values(settles_in_no_time, str(tmp_path))
    assert one == other and one[0][-1] == "default stays" and not list(tmp_path.iterdir())


def changes_pace_with_a_cache(folder: str) -> list[str]:
    """What was logged when the pace changes after a plan of an earlier run has stayed."""
    changes = iter(["", "steps take longer"])
    with (
        patch.multiple(pace, FEWEST=4, WINDOW_SECONDS=1e-6),
        patch.object(pace.Pace, "change", lambda self, now: next(changes, "")),
        patch.dict(os.environ, COMMFUSE_CACHE=folder),
        quickly("default"),
        logged() as messages,
    ):
        twins = Twins()
        twins.settle()
        while twins.is_settled:
            twins.run()
        twins.settle()
        twins.check()
    return messages


def test_a_plan_of_an_earlier_run_is_tried_anew_when_the_pace_changes(ranks: Ranks, tmp_path: Path) -> None:
    ranks.values(settles_with_a_cache, str(tmp_path), "default")
    for messages in ranks.values(changes_pace_with_a_cache, str(tmp_path)):
        assert "an earlier run has come to plan default, which is tried first" in messages
        assert "measuring again: steps take longer" in messages
        assert not any("no longer faster" in each for each in messages)


def trains_on_with_a_cache(folder: str, step_seconds: float) -> list[str]:
    """What was logged until a plan stays that keeps its pace. step_seconds: what every look at it finds."""
    with (
        patch.multiple(pace, FEWEST=4, WINDOW_SECONDS=1e-6),
        patch.object(replan, "median", lambda times: step_seconds),
        patch.dict(os.environ, COMMFUSE_CACHE=folder),
        quickly("default"),
        logged() as messages,
    ):
        twins = Twins()
        for _ in range(2):
            twins.settle()
            for _ in range(12):  # three looks
                twins.run()
        twins.check()
    return messages


def test_a_kept_plan_is_tried_anew_where_steps_take_other_times(ranks: Ranks, tmp_path: Path) -> None:
    """The default too, which no trial compares with others: the network may be another one by now."""
    for seconds, is_new, changes in ((0.1, True, 0), (0.1, False, 0), (0.2, False, 1), (0.2, False, 0)):
        for messages in ranks.values(trains_on_with_a_cache, str(tmp_path), seconds):
            text = "\n".join(messages)
            assert ("an earlier run has come to plan default" not in text) == is_new
            assert text.count("measuring again: steps take 2.00 of the time") == changes
            assert text.count("plans by what was measured") == is_new + changes
        (file,) = tmp_path.iterdir()
        kept = cf.StepProfile.load(file)
        assert (kept.plan, kept.step_seconds) == ("default", seconds)


def measures_the_network_anew() -> int:
    """A restart with the profile of a checkpoint, on another network: how often that is measured."""
    with quickly("size 1"):
        first = Twins()
        first.settle()
    profile, measured, changes = first.step.profile_used(), measured_plans.measured_cluster, iter(["", "other times"])
    with (
        patch.object(measured_plans, "measured_cluster", side_effect=measured) as network,
        quickly("size 1"),
        patch.multiple(pace, FEWEST=4, WINDOW_SECONDS=1e-6),
        patch.object(pace.Pace, "change", lambda self, now: next(changes, "")),
    ):
        twins = Twins({"schedule": "auto", "cluster": profile})
        twins.settle()
        assert not network.called
        while twins.is_settled:
            twins.run()
        twins.settle()
        twins.check()
    return network.call_count


def test_a_restart_measures_the_network_when_the_pace_changes(ranks: Ranks) -> None:
    assert ranks.values(measures_the_network_anew) == [1, 1]


def test_what_other_steps_have_left_is_not_used(ranks: Ranks, tmp_path: Path) -> None:
    for options in (
        {},
        {"gradients_mean": False},
        {"cluster": "measured", "schedule": cf.ScheduleConfig(memory_limit=1 << 30)},
    ):
        ranks.values(settles_and_leaves, str(tmp_path), options)
    assert len(list(tmp_path.iterdir())) == 3


def settles_and_leaves(folder: str, options: dict[str, Any]) -> None:
    with patch.dict(os.environ, COMMFUSE_CACHE=folder), quickly("default"):
        model = wide_mlp()
        step = cf.compile(model, loss_fn=F.cross_entropy, optimizer=adamw(model), **{"schedule": "auto", **options})
        number = 0
        while step.session.replan is not None and not step.session.replan.is_settled:
            step(*xy(number))
            number += 1


@pytest.mark.parametrize("damage", ["text", "other model", "no folder", "no name"])
def test_a_bad_cache_is_ignored_with_a_warning(ranks: Ranks, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / ("kept" if damage != "no name" else 300 * "x")
    if damage == "no folder":
        folder.write_text("a file")
    elif damage == "no name":
        pass  # longer than any: it cannot be looked into
    else:
        ranks.values(settles_with_a_cache, str(folder), "across steps")
        (file,) = folder.iterdir()
        text = file.read_text()
        model = json.loads(text)["model"]
        file.write_text(text[:100] if damage == "text" else text.replace(model, "0" * 64))
    one, other = ranks.values(warned_of_a_cache, str(folder))
    assert len(one[0]) > 3 and other[1] == "" and len(one[1].splitlines()) == 1
    assert one[1].count("is not kept for the next run" if damage.startswith("no ") else "a kept plan is ignored") == 1


def warned_of_a_cache(folder: str) -> tuple[list[str], str]:
    with logged() as messages:
        tried, _ = settles_with_a_cache(folder, "across steps")
    return tried, "\n".join(each for each in messages if "kept" in each)


def goes_on_at_another_pace(winner: str, slow_rank: int | None) -> tuple[list[str], list[str], list[str]]:
    """What is tried when the pace changes, and what was logged. slow_rank: whose nodes take longer since then."""
    changes = iter(["", "steps take longer", "", "steps take less"] if slow_rank is None else ["", "steps take longer"])
    seconds = MeasuredSteps.seconds

    def all_alike(steps: MeasuredSteps) -> dict[str, float] | None:
        found = seconds(steps)
        return found and dict.fromkeys(found, 1e-4)

    def slower(steps: MeasuredSteps) -> dict[str, float] | None:
        found = seconds(steps)
        return found and dict.fromkeys(found, 9e-4)

    with (
        quickly(winner),
        patch.multiple(pace, FEWEST=4, WINDOW_SECONDS=1e-6),
        patch.object(pace.Pace, "change", lambda self, now: next(changes, "")),
        patch.object(MeasuredSteps, "seconds", all_alike),
        logged() as messages,
    ):
        twins = Twins()
        twins.settle()
        first = twins.tried()
        for _ in range(1 if slow_rank is not None else 2):
            while twins.is_settled:
                twins.run()
            with patch.object(MeasuredSteps, "seconds", slower if dist.get_rank() == slow_rank else all_alike):
                twins.settle()
        while twins.number < 100:
            twins.run()
        twins.check()
    return first, twins.tried(), messages


@pytest.mark.parametrize(("winner", "then"), [("across steps", []), ("size 1", ["size 1, as before"])])
def test_plans_are_made_anew_when_the_pace_changes(ranks: Ranks, winner: str, then: list[str]) -> None:
    """The most promising one is tried, and that which ran, unless these are the same."""
    one, other = ranks.values(goes_on_at_another_pace, winner, None)
    first, second, messages = one
    assert (first, second) == other[:2]
    assert [each for each in messages if each.startswith("measuring again")] == [
        "measuring again: steps take longer",
        "measuring again: steps take less",
    ]
    tried = ["default", "across steps", *then]
    assert second == [*tried, f"{tried[-1]} stays"]


def test_a_slow_rank_is_named_and_no_reason_for_another_plan(ranks: Ranks) -> None:
    for first, second, messages in ranks.values(goes_on_at_another_pace, "across steps", 1):
        assert first == second
        assert any(
            each.startswith(("rank 1 computes ", "[rank 0] rank 1 computes", "[rank 1] rank 1")) for each in messages
        )
        assert "no other plan is made: the other ranks are as fast as before" in messages
