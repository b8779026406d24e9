"""Steps that try plans while they train: the same training, one plan on all ranks, and no rank left behind."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.frontends import measured_plans
from commfuse_fx.frontends.measured_steps import MeasuredSteps
from commfuse_fx.ir.meta import info
from commfuse_fx.planning import pace
from commfuse_fx.planning.correction import slower
from commfuse_fx.planning.planner import Planner
from commfuse_fx.runtime.execute.executor import Executor
from tests.distributed.harness import Ranks, run_soon
from tests.distributed.models_of_ranks import adamw, assert_same, snapshot, wide_mlp, xy
from tests.distributed.quick_trials import MOST_STEPS, quickly
from tests.logs import logged
from tests.oracle import ACROSS_STEPS, OPTIMAL

pytestmark = pytest.mark.dist


class Twins:
    """A step that tries plans, and one that does not, of the same model."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        self.model, self.twin = wide_mlp(), wide_mlp()
        self.optimizer, self.other = adamw(self.model), adamw(self.twin)
        asked = {"schedule": "auto"} if options is None else options
        self.step = cf.compile(self.model, loss_fn=F.cross_entropy, optimizer=self.optimizer, **asked)
        self.plain = cf.compile(self.twin, loss_fn=F.cross_entropy, optimizer=self.other)
        self.number = 0

    @property
    def is_settled(self) -> bool:
        assert self.step.session.replan is not None
        return self.step.session.replan.is_settled

    def run(self, rows: int = 4) -> None:
        x, y = xy(self.number, rows=rows)
        self.number += 1
        assert torch.equal(self.step(x, y), self.plain(x, y)), self.differences()

    def differences(self) -> str:
        """Where the two have come apart."""
        self.step.synchronize()
        pairs = zip(self.model.named_parameters(), self.twin.parameters(), strict=True)
        found = [f"{name}: {float((one - other).abs().max())}" for (name, one), other in pairs if not one.equal(other)]
        chosen = self.step.session.replan._chosen
        running = chosen.candidate.name if chosen.candidates else "default"
        return f"rank {dist.get_rank()}, step {self.number}, plan {running}: {found}"

    def settle(self, between: Callable[[Twins], None] = lambda twins: None) -> None:
        while not self.is_settled:
            assert self.number < MOST_STEPS
            self.run()
            between(self)

    def check(self) -> None:
        """Parameters and states are the same bits, also after more steps."""
        for _ in range(3):
            self.run()
        session = self.step.session
        assert session.replan is not None and session.running is not None
        chosen = session.replan._chosen
        assert not chosen.number or session.running.program is chosen.candidate.compiled.program
        self.step.synchronize()
        assert_same(snapshot(self.model, self.optimizer), snapshot(self.twin, self.other))

    def tried(self) -> list[str]:
        """What explain() says of the plans, without times."""
        notes = [each for each in self.step.lower(*xy(0)).explain().notes if each.topic == "plans tried"]
        return [f"{each.subject} stays" if each.reason == "stays" else each.subject for each in notes]


def settles(winner: str, options: dict[str, Any] | None = None) -> tuple[list[str], int, str]:
    with quickly(winner):
        twins = Twins(options)
        twins.settle()
        twins.check()
    lowered = twins.step.lower(*xy(0))
    return twins.tried(), twins.number, lowered.fingerprint


@pytest.mark.parametrize("winner", ["", "size 1", "across steps"])
def test_training_is_the_same_whatever_is_tried_and_stays(ranks: Ranks, winner: str) -> None:
    one, other = ranks.values(settles, winner)
    assert one == other
    tried, _, _ = one
    assert tried[0] == "default" and len(tried) > 2
    assert tried[-1].endswith(" stays") and (not winner or tried[-1] == f"{winner} stays")


@pytest.mark.parametrize(
    ("options", "winner"),
    [
        ({"comm_fusion": OPTIMAL}, "default"),
        (ACROSS_STEPS, "across steps"),
        ({"schedule": cf.ScheduleConfig(memory_limit=1 << 30)}, "planned"),
    ],
    ids=["optimal", "across steps", "limited"],
)
def test_what_is_asked_for_is_planned_with_measured_figures(ranks: Ranks, options: Any, winner: str) -> None:
    one, other = ranks.values(settles, winner, {**options, "cluster": "measured"})
    assert one == other
    tried, _, _ = one
    assert tried[0] == "default" and tried[-1] == f"{winner} stays"
    assert not any(each.startswith("size") for each in tried)


def is_due(twins: Twins, tries: bool) -> bool:
    """Whether the ranks meet before the next step: because plans are tried, or to make them."""
    found = twins.step.session.replan
    assert found is not None
    return not found.is_settled and found.clock.is_due and (found._turns is not None) == tries


def one_rank_fails(tries: bool, how: str) -> tuple[list[str], bool]:
    """Rank 1 fails in a step before which the ranks meet. Then all go on."""
    errors: list[str] = []

    def fail(twins: Twins) -> None:
        if errors or not is_due(twins, tries):
            return
        x, y = xy(twins.number)
        step: Any = twins.step
        if dist.get_rank() == 1:
            x = {"no batch": object(), "wrong size": x[:, :3]}.get(how, x)
            step = twins.plain if how == "other step" else step
        elif how == "Ctrl-C":
            return  # the other rank calls the same step once more
        interrupt = patch.object(Executor, "gather", side_effect=KeyboardInterrupt)
        with interrupt if how == "Ctrl-C" else nullcontext():
            try:
                step(x, y)
            except (cf.CommFuseError, RuntimeError, KeyboardInterrupt) as error:
                errors.append(type(error).__name__)

    with quickly():
        twins = Twins()
        twins.settle(fail)
        twins.check()
    return errors, twins.is_settled


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("no batch", [["PeerFailedError"], ["ConfigTypeError"]]),
        ("wrong size", [["PeerFailedError"], ["RuntimeError"]]),
        ("Ctrl-C", [[], ["KeyboardInterrupt"]]),
        ("other step", [["PlanMismatchError"], ["PlanMismatchError"]]),
    ],
)
@pytest.mark.parametrize("tries", [True, False])
def test_a_rank_that_fails_where_ranks_meet(ranks: Ranks, tries: bool, how: str, expected: list[list[str]]) -> None:
    found = run_soon(ranks, one_rank_fails, tries, how)
    assert [each.value for each in found] == [(errors, True) for errors in expected], [each.details for each in found]


def is_killed_where_ranks_meet(tries: bool) -> str:
    def leave(twins: Twins) -> None:
        if is_due(twins, tries) and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with quickly():
        try:
            Twins().settle(leave)
        except cf.CollectiveError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("tries", [True, False])
def test_a_rank_that_is_killed_where_ranks_meet(ranks: Ranks, tries: bool) -> None:
    one, other = run_soon(ranks, is_killed_where_ranks_meet, tries)
    assert other.died is not None and one.value.startswith("rank 0: the agreement before the first collective")


def with_other_things_between(what: str) -> list[str]:
    def between(twins: Twins) -> None:
        if what == "evaluation":
            for model, step in ((twins.model, twins.step), (twins.twin, twins.plain)):
                model.eval()
                step(*xy(0))
                model.train()
        elif what == "other sizes" and twins.number % 5 == 4:
            twins.run(rows=6)
        elif what == "other sizes on one rank" and dist.get_rank() == 1:
            twins.run(rows=4 + 2 * (twins.number % 2))
        elif what == "profile" and twins.number % 8 == 3:
            twins.step.profile(*xy(0), rounds=1)
        elif what == "new traces" and twins.number in (4, 9):
            twins.step.retrace()

    with quickly():
        twins = Twins()
        if what == "other sizes on one rank":
            while not twins.is_settled:
                assert twins.number < MOST_STEPS
                twins.run(rows=4 + 2 * (dist.get_rank() * (twins.number % 2)))
        else:
            twins.settle(between)
        twins.check()
    return twins.tried()


@pytest.mark.parametrize("what", ["evaluation", "other sizes", "other sizes on one rank", "profile", "new traces"])
def test_other_things_between_steps(ranks: Ranks, what: str) -> None:
    one, other = run_soon(ranks, with_other_things_between, what)
    assert one.value == other.value


def other_sizes_come(when: str) -> tuple[list[str], list[str], str]:
    """From some step on rank 1 has batches of two sizes: while plans are tried, or after one has stayed."""

    def rows() -> int:
        return 4 + 2 * (dist.get_rank() * (twins.number % 2))

    def others(twins: Twins) -> None:
        assert twins.step.session.replan is not None
        if twins.step.session.replan._turns is not None:
            twins.run(rows())

    with quickly("size 1"), logged() as messages:
        twins = Twins()
        twins.settle(others if when == "trials" else lambda twins: None)
        first = twins.tried()
        for number in range(MOST_STEPS):
            if twins.is_settled and number > 4:
                break
            twins.run(rows())
        twins.check()
        for _ in range(4):
            twins.run(rows())
    return first, twins.tried(), "\n".join(messages)


@pytest.mark.parametrize("when", ["trials", "end"])
def test_batches_of_other_sizes_come_to_one_rank(ranks: Ranks, when: str) -> None:
    one, other = ranks.values(other_sizes_come, when)
    assert one[:2] == other[:2] and one[1][-1] == "size 1 stays"


@contextmanager
def other_plans_by_size(until: int) -> Iterator[None]:
    """Plans follow from the size of the batch, for so many that are made."""
    planned_as, made = Planner.planned_as, iter(range(until))

    def otherwise(self: Planner, compiled: Any, config: Any, *args: Any) -> Any:
        if rows_of(compiled) == 6 and next(made, None) is not None:
            config = replace(config, comm_fusion=replace(config.comm_fusion, openstate=False))
        return planned_as(self, compiled, config, *args)

    with patch.object(Planner, "planned_as", otherwise):
        yield


def rows_of(compiled: Any) -> int:
    sources = compiled.captured.sources.items()
    return next(info(node).spec.shape[0] for node, source in sources if source.kind == "input")


def other_plans(until: int) -> tuple[list[str], str]:
    with quickly("size 1"), other_plans_by_size(until), logged() as messages:
        twins = Twins()
        twins.settle()
        for number in range(MOST_STEPS):
            twins.run(4 + 2 * (dist.get_rank() * (twins.number % 2)))
            if twins.is_settled and number > 4:
                break
        twins.check()
    return [each for each in messages if "sizes" in each], twins.tried()


@pytest.mark.parametrize(("until", "said"), [(1, 1), (10**6, 3)])
def test_ranks_whose_sizes_lead_to_other_plans_find_one_that_suits_all(ranks: Ranks, until: int, said: int) -> None:
    one, other = ranks.values(other_plans, until)
    assert len(one[0]) == len(other[0]) == said
    assert one[1] == other[1]


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


def with_a_given_network() -> tuple[str, list[str]]:
    with quickly("default"), patch.object(measured_plans, "measured_cluster", side_effect=AssertionError):
        twins = Twins({"schedule": "auto", "cluster": "gloo-1gbit"})
        twins.settle()
        twins.check()
    return twins.step.profile_used().cluster.name, twins.tried()


def test_a_network_that_is_given_is_not_measured(ranks: Ranks) -> None:
    one, other = ranks.values(with_a_given_network)
    assert one == other and one[0] == "gloo-1gbit" and len(one[1]) > 2


def ends_at_limits(limits: cf.TrialLimits) -> tuple[int, list[str]]:
    with quickly():
        twins = Twins({"schedule": "auto", "replan": limits})
        twins.settle()
        twins.check()
    return twins.number, twins.tried()


@pytest.mark.parametrize(("limits", "most"), [({"steps": 30}, 30), ({"seconds": 1e-9}, 12)], ids=["steps", "seconds"])
def test_trials_end_at_their_limits(ranks: Ranks, limits: dict[str, Any], most: int) -> None:
    one, other = ranks.values(ends_at_limits, cf.TrialLimits(**limits))
    assert one == other and one[0] <= most + 4 and one[1][-1] == "default stays"


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


@pytest.mark.parametrize("damage", ["text", "other model", "no folder"])
def test_a_bad_cache_is_ignored_with_a_warning(ranks: Ranks, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "kept"
    if damage == "no folder":
        folder.write_text("a file")
    else:
        ranks.values(settles_with_a_cache, str(folder), "across steps")
        (file,) = folder.iterdir()
        text = file.read_text()
        model = json.loads(text)["model"]
        file.write_text(text[:100] if damage == "text" else text.replace(model, "0" * 64))
    one, other = ranks.values(warned_of_a_cache, str(folder))
    assert len(one[0]) > 3 and other[1] == ""
    assert one[1].count("is not kept for the next run" if damage == "no folder" else "a kept plan is ignored") == 1


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


@pytest.mark.parametrize("winner", ["default", "across steps"])
def test_plans_are_made_anew_when_the_pace_changes(ranks: Ranks, winner: str) -> None:
    one, other = ranks.values(goes_on_at_another_pace, winner, None)
    first, second, messages = one
    assert (first, second) == other[:2]
    assert [each for each in messages if each.startswith("measuring again")] == [
        "measuring again: steps take longer",
        "measuring again: steps take less",
    ]
    tried, last = second[:-1], second[-1]  # the plan that ran is among them, as it is planned now or as it was
    assert tried[0] == "default" and tried[1] in first and tried[2:] in ([], [f"{winner}, as before"])
    assert last in (f"{winner} stays", f"{winner}, as before stays")


def test_a_slow_rank_is_named_and_no_reason_for_another_plan(ranks: Ranks) -> None:
    for first, second, messages in ranks.values(goes_on_at_another_pace, "across steps", 1):
        assert first == second
        assert any(
            each.startswith(("rank 1 computes ", "[rank 0] rank 1 computes", "[rank 1] rank 1")) for each in messages
        )
        assert "no other plan is made: the other ranks are as fast as before" in messages
