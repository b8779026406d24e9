"""An optimizer over some of the trainable parameters: the others stay as they are, and nothing is sent for them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from tests.models import CONTRASTIVE, MLP_CASE, SHARED, Case
from tests.oracle import (
    ACROSS_STEPS,
    APART_ACROSS_STEPS,
    OPTIMAL,
    SLOW,
    MakeOptimizer,
    assert_same,
    collectives,
    make_world,
    train_reference,
    train_world,
)

pytestmark = pytest.mark.usefixtures("no_other_plan")

PLANS: dict[str, dict[str, Any]] = {
    "auto": {},
    "unfused": {"comm_fusion": {"openstate": False}},
    "index": {"comm_fusion": {"allreduce": {"mode": "index", "config": [2]}}},
    "optimal": {"comm_fusion": OPTIMAL, "cluster": SLOW},
    "optimal-none": {"comm_fusion": OPTIMAL, "cluster": SLOW, "schedule": "none"},
    "across": ACROSS_STEPS,
    "apart-across": APART_ACROSS_STEPS,
}
each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


def over(*names: str, cls: Any = torch.optim.SGD, **settings: Any) -> MakeOptimizer:
    """An optimizer over the parameters with these names."""
    return lambda model: cls([model.get_parameter(name) for name in names], **settings)


def compare(case: Case, make_optimizer: MakeOptimizer, plan: dict[str, Any]) -> list[list[str]]:
    """Train on two ranks and on one device; returns what the collectives had for members."""
    model, batches = case.model(), case.batches(3)
    want = train_reference(case, model, batches, 2, make_optimizer)
    world = make_world(case, model, 2, make_optimizer, **plan)
    assert_same(train_world(world, batches), want)
    return [list(each.members) for each in collectives(world, batches[0])]


@each_plan
@pytest.mark.parametrize(
    "names", [("6.weight", "6.bias"), ("0.weight", "0.bias"), ("2.bias", "6.weight")], ids=["last", "first", "mixed"]
)
def test_the_rest_is_not_sent(names: tuple[str, ...], plan: dict[str, Any]) -> None:
    sent = compare(MLP_CASE, over(*names, lr=0.1, momentum=0.9), plan)
    assert sorted(name for members in sent for name in members) == sorted(names)


@each_plan
def test_an_opaque_optimizer(plan: dict[str, Any]) -> None:
    sent = compare(MLP_CASE, over("4.weight", "6.bias", cls=torch.optim.Adafactor, lr=0.1), plan)
    assert sorted(name for members in sent for name in members) == ["4.weight", "6.bias"]


@each_plan
@pytest.mark.parametrize("name", ["a", "b"])
def test_one_of_two_parameters_with_one_gradient(name: str, plan: dict[str, Any]) -> None:
    assert compare(SHARED, over(name, lr=0.1), plan) == [["a", "b"]]


@each_plan
def test_collectives_that_the_model_calls_stay(plan: dict[str, Any]) -> None:
    sent = compare(CONTRASTIVE, over("project.weight", lr=0.1), plan)
    written = ["/all_gather.0", "/all_reduce.0", "/grad.all_reduce.0", "/grad.reduce_scatter.0"]
    assert sorted(name for members in sent for name in members) == [*written, "project.weight"]


@each_plan
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
def test_a_param_group_that_shrinks(cls: Any, plan: dict[str, Any]) -> None:
    def shrink(optimizer: torch.optim.Optimizer | None) -> None:
        assert optimizer is not None
        optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][-2:]

    model, batches = MLP_CASE.model(), MLP_CASE.batches(4)
    reference = copy.deepcopy(model)
    plain = cls(reference.parameters(), lr=0.01)
    world = make_world(MLP_CASE, model, 2, lambda model: cls(model.parameters(), lr=0.01), **plan)
    for number, batch in enumerate(batches):
        if number == 2:
            shrink(plain)
            for optimizer in world.optimizers:
                shrink(optimizer)
        reference.zero_grad()
        assert MLP_CASE.loss_fn is not None
        MLP_CASE.loss_fn(reference(batch[0]), batch[1]).backward()
        plain.step()
        train_world(world, [batch])
    assert_same(world.models, [reference] * 2)


def test_explain_names_what_is_not_updated() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    step = cf.compile(model, loss_fn=nn.functional.mse_loss, optimizer=optimizer, device_num=2)
    text = step.lower(torch.randn(4, 8), torch.randn(4, 2)).explain().text()
    for name in ("0.weight", "0.bias"):
        assert f"{name}: the optimizer does not hold it" in text
    assert "1.weight: the optimizer" not in text


def test_parameters_of_another_model_are_refused() -> None:
    model, other = nn.Linear(8, 2), nn.Linear(8, 3)
    optimizer = torch.optim.SGD([*model.parameters(), other.weight], lr=0.1)
    refused = pytest.raises(
        cf.ConfigValueError,
        match=r"optimizer: parameter 2 of param group 0 \(shape \(3, 8\)\) is not a parameter of the model",
    )
    with refused:
        cf.compile(model, loss_fn=nn.functional.mse_loss, optimizer=optimizer)
    optimizer.param_groups[0]["params"].pop()
    step = cf.compile(model, loss_fn=nn.functional.mse_loss, optimizer=optimizer)
    x, y = torch.randn(4, 8), torch.randn(4, 2)
    step(x, y)
    optimizer.param_groups[0]["params"].append(other.weight)
    with refused:
        step(x, y)
