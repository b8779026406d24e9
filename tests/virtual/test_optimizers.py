"""Training on all ranks in one process against one device: every optimizer, its state, and low precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.models import BF16, MLP_CASE, Batch
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
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=9, cycle_momentum=True),
    ),
    "nadam": (by_class(torch.optim.NAdam, lr=1e-2, weight_decay=0.1), None),
    "nadam-all": (
        by_class(
            torch.optim.NAdam,
            lr=1e-2,
            betas=(0.8, 0.99),
            weight_decay=0.1,
            momentum_decay=0.1,
            decoupled_weight_decay=True,
            maximize=True,
        ),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=9, cycle_momentum=True),
    ),
    "radam": (by_class(torch.optim.RAdam, lr=1e-2), None),
    "radam-all": (
        by_class(
            torch.optim.RAdam,
            lr=1e-2,
            betas=(0.8, 0.9),
            weight_decay=0.1,
            decoupled_weight_decay=True,
            maximize=True,
        ),
        lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    ),
    "adamax": (by_class(torch.optim.Adamax, lr=1e-2), None),
    "adamax-all": (
        by_class(torch.optim.Adamax, lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1, maximize=True),
        lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    ),
    "adadelta": (by_class(torch.optim.Adadelta, lr=0.5), lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.3)),
    "adadelta-all": (by_class(torch.optim.Adadelta, lr=0.5, rho=0.8, weight_decay=0.1, maximize=True), None),
    "asgd": (by_class(torch.optim.ASGD, lr=1e-2), None),
    "asgd-all": (
        by_class(torch.optim.ASGD, lr=0.05, lambd=0.1, alpha=0.5, t0=2, weight_decay=0.1, maximize=True),
        lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    ),
    "rprop": (by_class(torch.optim.Rprop, lr=1e-3), lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)),
    "rprop-all": (
        by_class(torch.optim.Rprop, lr=1e-3, etas=(0.4, 1.5), step_sizes=(9e-4, 2e-3), maximize=True),
        None,
    ),
    "opaque": (by_class(torch.optim.Adafactor, lr=0.1), lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.3)),
}


OPTIMIZER_PLANS = ["fused", "unfused", "across", "apart-across"]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("plan", [{}, {"comm_fusion": OFF}, ACROSS_STEPS, APART_ACROSS_STEPS], ids=OPTIMIZER_PLANS)
def test_every_optimizer(name: str, plan: dict[str, Any]) -> None:
    make_optimizer, make_scheduler = OPTIMIZERS[name]
    model, batches = MLP_CASE.model(), MLP_CASE.batches(7)
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


def _eager_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
    for batch in batches:
        for name, grad in eager_gradients(MLP_CASE, model, batch).items():
            model.get_parameter(name).grad = grad
        optimizer.step()


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "opaque" not in name])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@each_plan
def test_eager_and_compiled_steps_take_turns(name: str, dtype: torch.dtype, plan: dict[str, Any]) -> None:
    """Steps go on from a checkpoint of the eager optimizer, and eager steps from the state that they leave."""
    make_optimizer, _ = OPTIMIZERS[name]
    reference, batches = MLP_CASE.model(dtype), MLP_CASE.batches(9, dtype=dtype)
    model = copy.deepcopy(reference)
    optimizer = make_optimizer(reference)
    world = make_world(MLP_CASE, model, 2, make_optimizer, **plan)
    _eager_steps(reference, optimizer, batches[:3])
    saved = copy.deepcopy(optimizer.state_dict())
    for each, mine in zip((*world.models, reference), (*world.optimizers, optimizer), strict=True):
        assert mine is not None
        each.load_state_dict(reference.state_dict())
        mine.load_state_dict(copy.deepcopy(saved))  # which gives numbers of the state the parameter's dtype
    train_world(world, batches[3:6])
    _eager_steps(reference, optimizer, batches[3:6])
    close = 1e-10 if dtype == torch.float64 else 1e-5
    for last in (batches[6:6], batches[6:]):
        _eager_steps(reference, optimizer, last)
        want = optimizer.state_dict()["state"]
        for each, mine in zip(world.models, world.optimizers, strict=True):
            assert mine is not None
            _eager_steps(each, mine, last)
            have = mine.state_dict()["state"]
            for number, state in want.items():
                assert [*have[number]] == [*state]
                assert_same_tensors(have[number], state, close)
        assert_same(world.models, [reference] * 2, close)


def _forget(optimizer: torch.optim.Optimizer) -> None:
    """The state of the second parameter."""
    optimizer.state.pop(optimizer.param_groups[0]["params"][1])


def _halve_mu_product(optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state[optimizer.param_groups[0]["params"][1]]
    state["mu_product"] = state["mu_product"] * 0.5


@pytest.mark.parametrize(("name", "change"), [("adam", _forget), ("nadam", _forget), ("nadam", _halve_mu_product)])
@each_plan
def test_parameters_with_numbers_of_their_own_are_updated_apart(
    name: str, change: Callable[[torch.optim.Optimizer], None], plan: dict[str, Any]
) -> None:
    make_optimizer, _ = OPTIMIZERS[name]
    reference, batches = MLP_CASE.model(), MLP_CASE.batches(6)
    optimizer = make_optimizer(reference)
    world = make_world(MLP_CASE, copy.deepcopy(reference), 2, make_optimizer, **plan)
    train_world(world, batches[:2])
    _eager_steps(reference, optimizer, batches[:2])
    for each in (*world.optimizers, optimizer):
        assert each is not None
        change(each)
    train_world(world, batches[2:])
    _eager_steps(reference, optimizer, batches[2:])
    assert_same(world.models, [reference] * 2)


@pytest.mark.parametrize("fp32", [True, False])
@pytest.mark.parametrize(
    "name", ["sgd", "sgd-nesterov", "sgd-dampening-maximize", "adamw-groups-schedule", "adagrad", "nadam"]
)
@each_plan
def test_low_precision_training(name: str, fp32: bool, plan: dict[str, Any]) -> None:
    """bfloat16 has 8 bits: after each of three updates parameters of size 1/2 may be a step of 2**-9 away."""
    model, batches = BF16.model(torch.bfloat16), BF16.batches(3, dtype=torch.bfloat16)
    make_optimizer, make_scheduler = OPTIMIZERS[name]
    want = train_reference(BF16, model, batches, 2, make_optimizer, make_scheduler)
    world = make_world(BF16, model, 2, make_optimizer, gradient_fp32_sync=fp32, **plan)
    assert_same(train_world(world, batches, make_scheduler), want, tolerance=6e-3)
