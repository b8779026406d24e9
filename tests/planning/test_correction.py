"""What trials teach about the network."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.cost.model import CostModel
from commfuse_fx.ir.core.program import Program
from commfuse_fx.trials.correction import corrected, slower, step_seconds

NETWORK = cf.resolve_cluster("gloo-1gbit")
BESIDE = 0.01
"""Seconds that measured steps take besides what is simulated."""


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    """The same step with other buckets."""
    found = []
    for fusion in ({}, {"openstate": False}, {"allreduce": {"mode": "size", "config": 1}}):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
        step = cf.compile(model, fusion, loss_fn=F.cross_entropy, device_num=4)
        found.append(step.lower(torch.randn(8, 256), torch.randint(0, 4, (8,))).program)
    return found


def profile() -> cf.StepProfile:
    return cf.StepProfile(cluster=NETWORK, world=4, model="0" * 64, node_seconds={"nothing": 0.0})


def measured(programs: list[Program], factor: float) -> list[tuple[Program, float]]:
    """What steps take on a network that is slower than the profile's."""
    costs = CostModel(slower(NETWORK, factor), profile().node_seconds)
    return [(program, step_seconds(program, costs) + BESIDE) for program in programs]


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_another_network_explains_what_was_measured(programs: list[Program], factor: float) -> None:
    found = corrected(profile(), measured(programs, factor))
    assert found.cluster == slower(NETWORK, factor)
    assert found.node_seconds == profile().node_seconds


def test_the_measured_network_stays_where_it_explains_all(programs: list[Program]) -> None:
    given = profile()
    assert corrected(given, measured(programs, 1.0)) is given


def test_it_stays_where_no_other_one_explains_more(programs: list[Program]) -> None:
    given = profile()
    times = measured(programs, 1.0)
    tried = [(program, took + each) for (program, took), each in zip(times, [0.0, 1e-4, -1e-4], strict=True)]
    assert corrected(given, tried) is given


def test_a_slower_network_takes_as_many_times_as_long() -> None:
    level = NETWORK.levels[0]
    assert slower(NETWORK, 2.0).levels == (replace(level, alpha=2 * level.alpha, bandwidth=level.bandwidth / 2),)
