"""Searches of GPT-2 and other models: as cheap as the integer program says, and near that on two axes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.plain_models import GPT2
from commfuse_fx.cost.model import CostModel
from commfuse_fx.machine.presets import resolve_cluster
from commfuse_fx.sharding.search.axis_by_axis import axis_by_axis
from commfuse_fx.sharding.search.axis_search import AxisSearch
from tests.models import CONV, MLP_CASE, Case
from tests.sharding.random_steps import caught
from tests.sharding.test_searched_models import CASES
from tests.solvers.integer_program import by_integer_program

LENGTH = 1024
EXPERTS = CASES[0]


@cache
def step_of(layers: int, mesh: tuple[int, ...]) -> tuple[Any, list[Any]]:
    """A GPT-2 of so many layers before it is divided, with two rows on each rank, and the mesh axes. Nobody writes its
    parameters, so they take no memory."""
    with torch.device("meta"):
        model: nn.Module = GPT2(layers)
    model.to_empty(device="cpu")
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    return caught(model, None, ids, ids, mesh)


@pytest.mark.parametrize(("layers", "is_whole"), [(2, True), (12, False)])
def test_one_axis_equals_the_integer_program(layers: int, is_whole: bool) -> None:
    """Of many layers the linear relaxation alone, which costs no more than the integer program."""
    program, axes = step_of(layers, (8,))
    search = AxisSearch(program, CostModel(resolve_cluster("h100-node")))
    found = search.cheapest(axes)
    best = by_integer_program(search.problem(axes).graph, is_whole)
    assert found.solver == "elimination" and found.gap == 0.0
    assert best.bound == pytest.approx(found.cost, rel=1e-8)


def close_to_the_bound(program: Any, axes: list[Any], cluster: str) -> None:
    """One axis at a time, against what no choice on all axes costs less than."""
    search = AxisSearch(program, CostModel(resolve_cluster(cluster)))
    found, best = axis_by_axis(search, axes), search.cheapest(axes)
    assert best.gap is not None and found.cost <= 1.1 * best.cost * (1 - best.gap)


def test_one_axis_at_a_time_is_close_to_both_together() -> None:
    close_to_the_bound(*step_of(2, (2, 4)), "h100-node")


@pytest.mark.parametrize("case", [MLP_CASE, CONV, EXPERTS], ids=lambda case: case.name)
def test_small_models_one_axis_at_a_time(case: Case) -> None:
    close_to_the_bound(*caught(case.model(), case.loss_fn, *case.batches(1)[0], (2, 4)), "gloo-1gbit")
