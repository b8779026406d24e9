"""Which plans there are besides the default, which of them are tried, and what a kept one depends on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.cost.priced import model_fingerprint
from commfuse_fx.ir.core.meta import info
from commfuse_fx.trials import alternatives, kept_plans
from commfuse_fx.trials.alternatives import Candidate, candidates, worth_a_trial
from commfuse_fx.trials.kept_plans import KeptPlans
from commfuse_fx.trials.measured_plans import MeasuredPlans

DEVICES = 4
CPU = torch.device("cpu")
GIVEN = {"allreduce": {"mode": "size", "config": 2}}


class Measured:
    """A step of a virtual world with a profile, as if it had been measured."""

    def __init__(self, ids: bool = False, **options: Any) -> None:
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
        if ids:
            for number, layer in enumerate(model):
                for param in layer.parameters():
                    param.comm_fusion = number % 2 + 1
        given = {key: value for key, value in options.items() if key in ("backend",)}
        self.asked = CompileConfig.resolve(options)
        first = {"comm_fusion": options.get("comm_fusion"), **given}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = cf.compile(model, loss_fn=F.cross_entropy, optimizer=optimizer, device_num=DEVICES, **first)
        self.planner = step.planner
        self.planner.keeps_captured = True
        self.base = self.planner.plan(self.planner.take_apart((torch.randn(8, 256), torch.randint(0, 4, (8,))), {}))
        self.profile = cf.StepProfile(
            cluster=cf.resolve_cluster("gloo-1gbit"),
            world=DEVICES,
            model=model_fingerprint(dict(model.named_parameters())),
            node_seconds={"nothing": 0.0},
        )

    def candidates(self) -> dict[str, Candidate]:
        found = candidates(self.planner, self.asked, self.base.compiled, self.profile)
        return {each.name: each for each in found}

    def in_common(self) -> list[str]:
        """The names of those that ranks try. This rank is alone."""
        clock: Any = SimpleNamespace(is_mixed=False, meet=lambda mine: [mine])
        plans = MeasuredPlans(self.planner, self.asked, clock, CPU)
        return [each.name for each in plans.of(self.base, self.profile).candidates]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"schedule": "auto"}, ["optimal", "across steps", "size 1", "size 4", "size 25"]),
        ({"schedule": cf.ScheduleConfig(mode="auto", across_steps=False)}, ["optimal", "size 1", "size 4", "size 25"]),
        ({"schedule": "auto", "comm_fusion": GIVEN}, ["planned", "across steps"]),
        (
            {"schedule": "auto", "comm_fusion": {"allreduce": {"mode": "auto", "config": None}}},
            ["planned", "across steps"],
        ),
        ({"cluster": "measured"}, ["planned"]),
    ],
)
def test_what_the_user_gives_is_kept(options: dict[str, Any], names: list[str]) -> None:
    found = Measured(**options).candidates()
    assert list(found) == ["default", *names]
    if given := options.get("comm_fusion"):
        assert all(
            each.config.comm_fusion == CompileConfig.resolve({"comm_fusion": given}).comm_fusion
            for each in found.values()
        )


def test_no_plan_fuses_parameters_of_different_ids() -> None:
    for name, each in Measured(ids=True, schedule="auto").candidates().items():
        for node in each.compiled.program.collectives():
            sent = info(node).collective
            assert sent is not None
            assert {int(member.split(".")[0]) % 2 + 1 for member in sent.members} == {sent.fusion_id}, name


def test_the_most_promising_plans_are_tried_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternatives, "text_of", lambda each: each.remark or each.name)

    def tried(*predicted: float, remark: str = "") -> list[str]:
        nothing: Any = None
        made = [Candidate(str(number), nothing, nothing, each, remark) for number, each in enumerate(predicted)]
        return [each.name for each in worth_a_trial(made)]

    assert tried(1.0, 0.9, 0.8, 0.81, 0.82, 0.83) == ["0", "2", "3", "4"]  # the default and three others
    assert tried(1.0, 0.9, 0.8) == ["0", "2"]  # 0.9 is more than 5% above the fastest
    assert tried(1.0, 1.04, 1.06) == ["0", "1"]
    assert tried(1.0, 0.9, 0.8, remark="the same program") == ["0"]


def test_with_inductor_only_compiled_plans_are_tried_unless_they_are_asked_for() -> None:
    assert Measured(schedule="auto", backend="inductor").in_common() == ["default"]
    assert "optimal" in Measured(schedule="auto").in_common()
    optimal = {"allreduce": {"mode": "optimal", "config": None}}
    assert Measured(comm_fusion=optimal, cluster="measured", backend="inductor").in_common() == ["default", "optimal"]


def test_a_kept_plan_depends_on_step_options_machine_and_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(kept_plans.VARIABLE, str(tmp_path))
    measured = Measured(schedule="auto")
    captured = measured.base.compiled.captured
    assert captured is not None

    def path(machine: str = "a CPU", **options: Any) -> Path | None:
        return KeptPlans(captured, CompileConfig.resolve({"schedule": "auto", **options}), machine).path

    first = path()
    assert path() == first and path(schedule=cf.ScheduleConfig(mode="auto")) == first
    others = [
        path("another CPU"),
        path(schedule=cf.ScheduleConfig(mode="auto", across_steps=False)),
        path(schedule=cf.ScheduleConfig(mode="auto", memory_limit=1 << 30)),
        path(comm_fusion={"allreduce": {"mode": "auto", "config": None}}),
        path(gradients_mean=False),
        path(cluster="gloo-1gbit"),
        path(cluster="gloo-10gbit"),
    ]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    others.append(path())
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr(captured, "torch_version", "2.99.0")
    others.append(path())
    assert first not in others and len(dict.fromkeys(others)) == len(others)


def test_a_step_that_chooses_its_plan_is_explained_by_the_cluster_that_is_given() -> None:
    model = nn.Linear(8, 8)
    for given in ("gloo-1gbit", None):
        step = cf.compile(model, loss_fn=F.mse_loss, schedule="auto", cluster=given, device_num=2)
        lowered = step.lower(torch.randn(4, 8), torch.randn(4, 8))
        assert lowered.explain().cluster.startswith(f"cluster {given or 'gloo-10gbit'} ")
        assert lowered.explain("gloo-25gbit").cluster.startswith("cluster gloo-25gbit ")
