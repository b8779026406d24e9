"""Strategies that are searched with a profile: what a node took counts by the part of it that a rank would have."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.cost.model import CostModel, cost_model, profile_key
from commfuse_fx.cost.priced import model_fingerprint
from commfuse_fx.cost.roofline import roofline_seconds
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.machine.presets import resolve_cluster
from commfuse_fx.measure.profiling import roofline_by_key
from commfuse_fx.sharding.search.axis_search import AxisSearch
from tests.sharding.random_steps import random_step
from tests.undrawn import undrawn

NODE = resolve_cluster("h100-node")
CLUSTER = replace(NODE, device=replace(NODE.device, op_overhead=1e-12))
"""On which times of small ops grow with their work."""

TIMES = 1e4
"""How much slower than the figures of its device the measured machine is."""


def model() -> nn.Module:
    return undrawn(lambda: nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)))


def lowered(cluster: Any, mode: str = "auto") -> Any:
    x, made = torch.empty(8, 1024), model()
    sgd = torch.optim.SGD(made.parameters(), lr=0.1)
    options = {"parallel_mode": mode, "mesh": (8,), "device_num": 8, "cluster": cluster}
    return cf.compile(made, loss_fn=nn.functional.mse_loss, optimizer=sgd, **options).lower(x, x)


def measured(program: Program) -> cf.StepProfile:
    """As if every node of this program took so many times as long as the roofline says."""
    found: dict[str, list[float]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            found.setdefault(profile_key(node), []).append(TIMES * roofline_seconds(node, CLUSTER.device))
    seconds = {key: mean(each) for key, each in found.items()}
    params = dict(model().named_parameters())
    return cf.StepProfile(
        cluster=CLUSTER,
        world=8,
        model=model_fingerprint(params),
        node_seconds=seconds,
        node_roofline=roofline_by_key(program, CLUSTER.device, seconds),
    )


def repeated() -> Program:
    """A plan in which every rank computes the whole batch: on a network where each message takes long."""
    levels = tuple(replace(level, alpha=10.0, alpha_busy=10.0) for level in CLUSTER.levels)
    found: Program = lowered(replace(CLUSTER, levels=levels)).program
    return found


def test_a_plan_with_other_parts_is_priced_by_their_work() -> None:
    whole, batch = repeated(), lowered(CLUSTER, "semi_auto").program
    profile = measured(whole)
    costs, without = cost_model(profile), CostModel(CLUSTER, profile.node_seconds)
    others = [
        node for node in batch.graph.nodes if profile_key(node) in profile.node_roofline and info(node).share == 1
    ]
    assert sum("mm" in profile_key(node) for node in others) >= 4
    for node in others:
        assert costs.compute_seconds(node) == pytest.approx(TIMES * roofline_seconds(node, CLUSTER.device))
        assert without.compute_seconds(node) == profile.node_seconds[profile_key(node)]
    for node in whole.graph.nodes:  # what was measured stays as it was
        assert costs.compute_seconds(node) == pytest.approx(without.compute_seconds(node), rel=1e-12)


def test_a_search_does_not_depend_on_the_plan_that_was_measured() -> None:
    ones = [measured(program) for program in (repeated(), lowered(CLUSTER, "semi_auto").program)]
    found = [lowered(profile).program.strategies.to_json() for profile in ones]
    by_name = lowered(replace(ones[0], node_roofline={})).program.strategies.to_json()
    assert found[0] == found[1] != by_name and '"0.weight": "dp: S(0)"' in found[0]


def test_prices_of_states_follow_the_part() -> None:
    program, axes = random_step(3, 3, (4,))
    plain = AxisSearch(program, CostModel(CLUSTER)).problem(axes)
    node = next(node for node in program.graph.nodes if "mm" in str(node.target))
    name = profile_key(node)
    seconds = {name: TIMES * roofline_seconds(node, CLUSTER.device)}
    priced = AxisSearch(program, CostModel(CLUSTER, seconds, {name: roofline_seconds(node, CLUSTER.device)})).problem(
        axes
    )
    number = plain.named[info(node).name]
    table, other = (each.graph.unary[number] for each in (plain, priced))
    assert other.tolist() == pytest.approx((TIMES * table).tolist())
