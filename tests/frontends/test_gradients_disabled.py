"""A call with gradients disabled evaluates, whatever mode the model is in, and leaves no inference tensors behind."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests.models import shards
from tests.oracle import ACROSS_STEPS

DISABLED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
}
each_way = pytest.mark.parametrize("disabled", DISABLED.values(), ids=DISABLED)


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(number)
    return torch.randn(8, 8), torch.randn(8, 4)


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterable[torch.Tensor]:
    yield from (*model.parameters(), *model.buffers())
    yield from (param.grad for param in model.parameters() if param.grad is not None)
    for state in optimizer.state.values() if optimizer else ():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def assert_ordinary(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    assert not any(tensor.is_inference() or tensor.data.is_inference() for tensor in tensors(model, optimizer))


def train_eagerly(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("way", "whole_step"), [("no_grad", True), ("inference_mode", True), ("set_grad_enabled", False)]
)
def test_a_call_evaluates_as_eager_does(way: str, whole_step: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Before the first training step and after it; then training goes on as if nothing had been."""
    disabled = DISABLED[way]
    model = Net(dropout=0.5)
    reference = copy.deepcopy(model)
    optimizer, plain = adamw(model), adamw(reference)
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=optimizer if whole_step else None)
    for number in range(2):
        x, y = batch(number)
        with disabled():
            torch.manual_seed(number)
            loss = step(x, y)
            torch.manual_seed(number)
            want = F.mse_loss(reference(x), y)
        torch.testing.assert_close(loss, want)
        x, y = batch(10 + number)
        torch.manual_seed(number)
        if not whole_step:
            optimizer.zero_grad()
        step(x, y)
        if not whole_step:
            optimizer.step()
        torch.manual_seed(number)
        train_eagerly(reference, plain, x, y)
        torch.testing.assert_close(model.state_dict(), reference.state_dict())
        assert_ordinary(model, optimizer)
    (said,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "a step of Net was called with gradients disabled" in said.getMessage()


@each_way
def test_the_first_call_leaves_nothing_but_statistics(disabled: Any) -> None:
    model = Net()
    optimizer = adamw(model)
    before = copy.deepcopy(model)
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=optimizer)
    with disabled():
        x, y = batch(0)  # in inference mode these are inference tensors
        step(x, y)
        before(x)
    torch.testing.assert_close(model.state_dict(), before.state_dict())
    assert not optimizer.state and all(param.grad is None for param in model.parameters())
    assert_ordinary(model, optimizer)


def test_a_scheduler_sees_no_optimizer_step() -> None:
    model = Net()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=optimizer)
    with torch.no_grad():
        step(*batch(0))
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step"):
        scheduler.step()
    step(*batch(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(*batch(1))
        scheduler.step()


def test_a_model_in_eval_mode_has_one_graph_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = Net().eval()
    step = cf.compile(model, loss_fn=F.mse_loss)
    for disabled in (*DISABLED.values(), torch.enable_grad):
        with disabled():
            step(*batch(0))
    assert len(step.planner.plans) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_lower_shows_what_a_call_would_run() -> None:
    model = Net()
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=adamw(model), device_num=2)
    with torch.inference_mode():
        assert not step.lower(*batch(0)).collectives
    assert step.lower(*batch(0)).collectives


PLANS: dict[str, dict[str, Any]] = {
    "data_parallel": {},
    "across_steps": ACROSS_STEPS,
    "semi_auto": {"parallel_mode": "semi_auto", "mesh": (2, 1)},
    "divided": {"parallel_mode": "semi_auto", "mesh": (1, 2)},
}


@pytest.mark.parametrize(
    ("way", "plan"),
    [*(("inference_mode", plan) for plan in PLANS), ("no_grad", "data_parallel"), ("no_grad", "divided")],
)
def test_all_ranks_of_a_plan(way: str, plan: str) -> None:
    """Also eager reads with gradients disabled, which finish updates and gather divided parameters."""
    disabled = DISABLED[way]
    model = Net()
    if plan == "divided":
        cf.shard(model.first, weight=("tp", None))
        cf.shard(model.last, weight=(None, "tp"))
    optimizer = adamw(model)
    reference = copy.deepcopy(model)
    plain = adamw(reference)
    world = LockstepWorld(cf.compile(model, loss_fn=F.mse_loss, optimizer=optimizer, device_num=2, **PLANS[plan]))
    parts = 1 if plan == "divided" else 2
    for number in range(3):
        x, y = batch(number)
        x, y = (x, y) if plan in ("semi_auto", "divided") else (x[:4].repeat(2, 1), y[:4].repeat(2, 1))
        mine = shards((x, y), parts) * (2 // parts)
        with disabled():
            results = world(mine)
            want = F.mse_loss(reference(x), y)
            torch.testing.assert_close(results[0].loss + results[1].loss, 2 * want, rtol=1e-4, atol=1e-5)
        world(mine)
        train_eagerly(reference, plain, x, y)
        with disabled():
            for each in world.models:
                torch.testing.assert_close(each.first.weight, reference.first.weight, rtol=1e-4, atol=1e-5)
        for each, made in zip(world.models, world.optimizers, strict=True):
            assert_ordinary(each, made)


class SwitchesItself(Net):
    """Calls `change` on itself when it is run."""

    def __init__(self, change: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self)
        return super().forward(x)


def set_flag(model: nn.Module) -> None:
    model.training = not model.training


@pytest.mark.parametrize("options", [{}, ACROSS_STEPS], ids=["default", "across"])
@pytest.mark.parametrize(
    "change, training, mode",
    [(nn.Module.eval, True, "eval"), (nn.Module.train, False, "training"), (set_flag, True, "eval")],
)
def test_a_model_that_switches_itself_is_refused(
    change: Callable[[nn.Module], object], training: bool, mode: str, options: dict[str, Any]
) -> None:
    model = SwitchesItself(change).train(training)
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **options)
    for _ in range(2):
        with pytest.raises(cf.CaptureError, match=f"leaves SwitchesItself itself in {mode} mode"):
            step(torch.randn(4, 8), torch.randn(4, 4))
        assert model.training is training


def test_a_model_may_switch_its_modules_and_itself_for_a_while() -> None:
    def change(model: nn.Module) -> None:
        model.eval()
        model.train()
        model.norm.eval()  # type: ignore[operator, union-attr]

    model = SwitchesItself(change)
    twin = copy.deepcopy(model)
    step = cf.compile(model, loss_fn=F.mse_loss)
    for _ in range(3):
        x, y = torch.randn(4, 8), torch.randn(4, 4)
        torch.testing.assert_close(step(x, y), F.mse_loss(twin(x), y).detach())
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("trained_before", [True, False])
def test_a_first_call_in_eval_mode_is_warned_of(
    trained_before: bool, grad: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    step = cf.compile(model, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    if trained_before:
        step(torch.randn(4, 8), torch.randn(4, 4))
    model.eval()
    with torch.set_grad_enabled(grad), caplog.at_level(logging.WARNING):
        for rows in (4, 5):
            step(torch.randn(rows, 8), torch.randn(rows, 4))
    said = [record.getMessage() for record in caplog.records if "has the model in eval mode" in record.getMessage()]
    assert len(said) == (grad and not trained_before)
