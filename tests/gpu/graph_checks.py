"""Checks of what may happen between steps that run from a CUDA graph. On a CPU the same steps run without one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import commfuse_fx as cf
from tests.gpu.device_models import MODELS, WITH_DROPOUT, Batch
from tests.gpu.step_checks import CLOSE, STEPS, MakeOptimizer, assert_near, gradients

F64 = torch.float64
CASE = MODELS["mlp"]


class Beside:
    """A step and an eager model beside it, which train on the same batches."""

    def __init__(self, device: torch.device, optimizer: MakeOptimizer | None, **options: Any) -> None:
        self.device = device
        self.model = CASE.on(device, F64)
        self.twin = copy.deepcopy(self.model)
        self.ours = None if optimizer is None else optimizer(self.model.parameters())
        self.theirs = None if optimizer is None else optimizer(self.twin.parameters())
        self.step = cf.compile(self.model, optimizer=self.ours, form="step", **options)
        self.losses: list[tuple[torch.Tensor, torch.Tensor]] = []

    def train(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            loss = self.step(**batch)
            if self.theirs is not None:
                self.theirs.zero_grad()
            want = self.twin(**batch)
            want.backward()
            if self.theirs is not None:
                self.theirs.step()
            self.losses.append((loss, want.detach()))
        self.check()

    def both(self, change: Callable[[nn.Module, Any], None]) -> None:
        change(self.model, self.ours)
        change(self.twin, self.theirs)

    def check(self) -> None:
        """Losses that were kept are what they were, and parameters are those of the eager model."""
        assert_near([loss for loss, _ in self.losses], [want for _, want in self.losses], CLOSE[F64])
        assert_near(self.model.parameters(), self.twin.parameters(), CLOSE[F64])

    def batches(self, count: int, seed: int = 0, rows: int = 8) -> list[Batch]:
        found = CASE.batches(self.device, F64, count, seed)
        return [{name: value[:rows].clone() for name, value in batch.items()} for batch in found]


def check_what_users_do_between_steps(device: torch.device, optimizer: MakeOptimizer, **options: Any) -> None:
    pair = Beside(device, optimizer, **options)
    pair.train(pair.batches(STEPS))

    def write(model: nn.Module, _: Any) -> None:
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)

    pair.both(write)
    pair.train(pair.batches(2, 1))
    for rows in (8, 5, 8, 5, 5, 5, 5, 8):  # another shape has a graph of its own
        pair.train(pair.batches(1, rows, rows))

    def evaluate(model: nn.Module, _: Any) -> None:
        model.eval()
        with torch.no_grad():
            model(**pair.batches(1, 2)[0])
        model.train()

    pair.both(evaluate)
    pair.train(pair.batches(2, 3))
    saved: list[Any] = []

    def save(model: nn.Module, optim: Any) -> None:
        saved.append(copy.deepcopy((model.state_dict(), optim.state_dict())))

    def load(model: nn.Module, optim: Any) -> None:
        of_model, of_optimizer = saved.pop(0)
        model.load_state_dict(of_model)
        optim.load_state_dict(of_optimizer)

    pair.both(save)
    pair.train(pair.batches(2, 4))
    pair.both(load)
    pair.train(pair.batches(STEPS, 5))

    def decay(_: nn.Module, optim: Any) -> None:
        optim.param_groups[0]["weight_decay"] = 0.1

    pair.both(decay)
    pair.train(pair.batches(STEPS, 6))

    def replace(model: nn.Module, _: Any) -> None:
        for param in model.parameters():
            param.data = param.data.clone()

    pair.both(replace)
    pair.train(pair.batches(STEPS, 7))


def check_one_cycle(device: torch.device, optimizer: MakeOptimizer, **options: Any) -> None:
    """The learning rate and the momentum are others in each step."""
    pair = Beside(device, optimizer, **options)
    assert pair.ours is not None and pair.theirs is not None
    cycles = [
        torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.01, total_steps=20) for each in (pair.ours, pair.theirs)
    ]
    for batch in pair.batches(12):
        pair.train([batch])
        for cycle in cycles:
            cycle.step()


def check_scheduled_rate(device: torch.device, optimizer: MakeOptimizer, **options: Any) -> None:
    """The learning rate is another one in each step, and nothing else is."""
    pair = Beside(device, optimizer, **options)
    assert pair.ours is not None and pair.theirs is not None
    rates = [torch.optim.lr_scheduler.ExponentialLR(each, 0.7) for each in (pair.ours, pair.theirs)]
    for batch in pair.batches(2 * STEPS):
        pair.train([batch])
        for rate in rates:
            rate.step()


def check_gradients_without_optimizer(device: torch.device, **options: Any) -> None:
    """Gradients land in `.grad`, which the user sets to None, to zero, or lets grow."""
    pair = Beside(device, None, **options)
    for number, batch in enumerate(pair.batches(2 * STEPS)):
        if number % 3:
            pair.model.zero_grad(set_to_none=number % 2 == 0)
            pair.twin.zero_grad(set_to_none=number % 2 == 0)
        pair.train([batch])
        assert_near(gradients(pair.model), gradients(pair.twin), CLOSE[F64])


def check_a_loader_that_pins_memory(device: torch.device, optimizer: MakeOptimizer, **options: Any) -> None:
    """Batches come from pinned memory, without waiting, while steps are captured and run."""
    pair = Beside(device, optimizer, **options)
    data = CASE.batches(torch.device("cpu"), F64, 10)
    dataset = TensorDataset(*(torch.cat([batch[name] for batch in data]) for name in ("x", "labels")))
    for x, labels in DataLoader(dataset, batch_size=8, pin_memory=device.type == "cuda", num_workers=0):
        batch = {"x": x.to(device, non_blocking=True), "labels": labels.to(device, non_blocking=True)}
        pair.train([batch])


def check_masks_after_a_checkpoint(device: torch.device, optimizer: MakeOptimizer, **options: Any) -> None:
    """Each step draws another mask, and draws it again after the state of the generators is set back."""
    case = WITH_DROPOUT["mlp"]
    model = case.on(device, F64)
    step = cf.compile(model, optimizer=optimizer(model.parameters()), **options)
    batch = case.batches(device, F64, 1)[0]
    for _ in range(STEPS):
        step(**batch)
    before = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    first = [step(**batch) for _ in range(3)]
    model.load_state_dict(before)
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)
    again = step(**batch)
    torch.testing.assert_close(again, first[0], rtol=1e-12, atol=1e-12)
    assert len({float(loss) for loss in first}) == 3
