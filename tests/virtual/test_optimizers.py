"""Training on all ranks in one process against one device: every optimizer, its state, and low precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.models import BF16, MLP_CASE
from tests.oracle import (
    ACROSS_STEPS,
    APART_ACROSS_STEPS,
    MakeOptimizer,
    MakeScheduler,
    assert_same,
    assert_same_tensors,
    by_class,
    each_plan,
    eager_gradients,
    make_world,
    train_reference,
    train_world,
)

pytestmark = pytest.mark.usefixtures("no_other_plan")

OFF = {"openstate": False}


def _adamw_in_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Weights decay, biases do not and learn faster; the first layer uses other betas."""
    first, *rest = [list(module.parameters()) for module in model.children() if list(module.parameters())]
    weights = [param for params in rest for param in params if param.ndim > 1]
    biases = [param for params in rest for param in params if param.ndim == 1]
    groups = [
        {"params": weights, "weight_decay": 0.1},
        {"params": biases, "weight_decay": 0.0, "lr": 3e-3},
        {"params": first, "betas": (0.8, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, amsgrad=True)


OPTIMIZERS: dict[str, tuple[MakeOptimizer, MakeScheduler | None]] = {
    "sgd": (by_class(torch.optim.SGD, lr=0.1), None),
    "sgd-nesterov": (by_class(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), None),
    "sgd-dampening-maximize": (by_class(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, maximize=True), None),
    "adam": (by_class(torch.optim.Adam, lr=1e-2, weight_decay=0.1), None),
    "adamw-groups-schedule": (_adamw_in_groups, lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)),
    "adagrad": (by_class(torch.optim.Adagrad, lr=1e-2, lr_decay=0.1, weight_decay=0.1), None),
    "adagrad-accumulator": (by_class(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.5), None),
    "rmsprop": (by_class(torch.optim.RMSprop, lr=1e-2), None),
    "rmsprop-all": (
        by_class(torch.optim.RMSprop, lr=1e-2, momentum=0.9, centered=True, weight_decay=0.1),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=5, cycle_momentum=True),
    ),
    "opaque": (by_class(torch.optim.Adadelta, lr=0.5), lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.3)),
    "opaque-nadam": (by_class(torch.optim.NAdam, lr=1e-2, weight_decay=0.1), None),
}


OPTIMIZER_PLANS = ["fused", "unfused", "across", "apart-across"]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("plan", [{}, {"comm_fusion": OFF}, ACROSS_STEPS, APART_ACROSS_STEPS], ids=OPTIMIZER_PLANS)
def test_every_optimizer(name: str, plan: dict[str, Any]) -> None:
    make_optimizer, make_scheduler = OPTIMIZERS[name]
    model, batches = MLP_CASE.model(), MLP_CASE.batches(3)
    want = train_reference(MLP_CASE, model, batches, 2, make_optimizer, make_scheduler)
    world = make_world(MLP_CASE, model, 2, make_optimizer, **plan)
    models = train_world(world, batches, make_scheduler)
    # A scheduler that sets the learning rate reads nothing of the updates, so they are still to come.
    assert world.is_pending == ("schedule" in plan and "opaque" not in name)
    assert_same(models, want)


@each_plan
def test_optimizer_state_after_training(plan: dict[str, Any]) -> None:
    model, batches = MLP_CASE.model(), MLP_CASE.batches(3)
    reference = copy.deepcopy(model)
    optimizer = _adamw_in_groups(reference)
    for batch in batches:
        optimizer.zero_grad()
        for param, grad in eager_gradients(MLP_CASE, reference, batch).items():
            reference.get_parameter(param).grad = grad
        optimizer.step()
    world = make_world(MLP_CASE, model, 2, _adamw_in_groups, **plan)
    train_world(world, batches)
    want = optimizer.state_dict()["state"]
    for mine in world.optimizers:
        assert mine is not None
        have = mine.state_dict()["state"]
        for number, state in want.items():
            assert_same_tensors(have[number], state, 1e-10)


@pytest.mark.parametrize("fp32", [True, False])
@pytest.mark.parametrize("name", ["sgd", "sgd-nesterov", "sgd-dampening-maximize", "adamw-groups-schedule", "adagrad"])
@each_plan
def test_low_precision_training(name: str, fp32: bool, plan: dict[str, Any]) -> None:
    """bfloat16 has 8 bits: after each of three updates parameters of size 1/2 may be a step of 2**-9 away."""
    model, batches = BF16.model(torch.bfloat16), BF16.batches(3, dtype=torch.bfloat16)
    make_optimizer, make_scheduler = OPTIMIZERS[name]
    want = train_reference(BF16, model, batches, 2, make_optimizer, make_scheduler)
    world = make_world(BF16, model, 2, make_optimizer, gradient_fp32_sync=fp32, **plan)
    assert_same(train_world(world, batches, make_scheduler), want, tolerance=6e-3)
