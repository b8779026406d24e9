"""Calls of a step that updates once for several of them: what may come between, and what never counts twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from tests.runtime.captured_pairs import Pair

COUNT = 3


class Net(nn.Module):
    """Draws random numbers, writes to buffers, and fails if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.fails = self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise KeyError("as it was told")
        hidden = F.dropout(self.norm(self.first(x)).relu(), 0.3, self.training)
        return hidden[:, :3] if self.skips else self.last(hidden)


def batch(number: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, 4, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


class Twins:
    """A step that updates every third call, and a loop in plain PyTorch. Both draw the same random numbers."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.twin = copy.deepcopy(self.model)
        self.optimizer, self.other = (
            torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (self.model, self.twin)
        )
        self.step = cf.compile(
            self.model, loss_fn=F.cross_entropy, optimizer=self.optimizer, accumulate_steps=COUNT, **options
        )
        self.number = 0  # of micro-batches

    def run(self, rows: int = 8) -> None:
        given, state = batch(self.number, rows), torch.get_rng_state()
        loss = self.step(*given)
        torch.set_rng_state(state)
        want = F.cross_entropy(self.twin(given[0]), given[1])
        (want / COUNT).backward()
        torch.testing.assert_close(loss, want.detach(), rtol=1e-6, atol=1e-6)
        self.number += 1
        if self.number % COUNT == 0:
            self.other.step()
            self.other.zero_grad()
        self.check()

    def check(self) -> None:
        torch.testing.assert_close(dict(self.model.state_dict()), dict(self.twin.state_dict()), rtol=1e-5, atol=1e-6)
        assert all(param.grad is None for param in self.model.parameters())
        assert self.step.steps == self.number // COUNT


def test_calls_are_those_of_a_loop() -> None:
    twins = Twins()
    for _ in range(3 * COUNT):
        twins.run()


def test_shapes_may_change_between_micro_batches() -> None:
    twins = Twins()
    for rows in (8, 6, 8, 6, 6, 4, 8, 8, 4, 4, 6, 8):
        twins.run(rows)


def evaluate(twins: Twins) -> None:
    twins.model.eval()
    assert float(twins.step(*batch(50))) > 0
    twins.model.train()


def without_gradients(twins: Twins) -> None:
    """Moves statistics and draws random numbers, as it does in eager PyTorch."""
    state = torch.get_rng_state()
    with torch.no_grad():
        twins.step(*batch(51))
        torch.set_rng_state(state)
        twins.twin(batch(51)[0])


def fail(twins: Twins) -> None:
    twins.model.fails = True
    with pytest.raises(KeyError, match="as it was told"):
        twins.step(*batch(52, rows=5))
    twins.model.fails = False


def fail_late(twins: Twins) -> None:
    """In the middle of a graph that has been made before."""
    x, y = batch(53)
    before = copy.deepcopy(twins.model.state_dict())
    with pytest.raises(IndexError):
        twins.step(x, y + 5)
    torch.testing.assert_close(dict(twins.model.state_dict()), dict(before))


def load(twins: Twins) -> None:
    """Another state of model and optimizer: what gradients there are stays, as in a loop."""
    for model, optimizer in ((twins.model, twins.optimizer), (twins.twin, twins.other)):
        values = {
            name: value * 0.5 if value.is_floating_point() else value for name, value in model.state_dict().items()
        }
        model.load_state_dict(values)
        state = optimizer.state_dict()
        for held in state["state"].values():
            held["momentum_buffer"] = held["momentum_buffer"] * 0.5
        optimizer.load_state_dict(state)


def lower(twins: Twins) -> None:
    assert twins.step.lower_micro_batch(*batch(0)).text() != twins.step.lower(*batch(0)).text()


def retrace(twins: Twins) -> None:
    twins.step.retrace()


def profile(twins: Twins) -> None:
    twins.step.profile(*batch(54), rounds=1)


def set_momentum(twins: Twins) -> None:
    """Makes another graph of the update."""
    for optimizer in (twins.optimizer, twins.other):
        optimizer.param_groups[0]["nesterov"] = not optimizer.param_groups[0]["nesterov"]


@pytest.mark.parametrize("place", range(COUNT))
@pytest.mark.parametrize(
    "between",
    [evaluate, without_gradients, fail, fail_late, load, lower, retrace, profile, set_momentum],
    ids=lambda between: between.__name__,
)
def test_other_things_between_micro_batches(between: Callable[[Twins], None], place: int) -> None:
    twins = Twins()
    for _ in range(COUNT + place):
        twins.run()
    between(twins)
    for _ in range(2 * COUNT - place):
        twins.run()
    assert twins.step.steps == 3


def test_a_failure_in_the_first_calls() -> None:
    twins = Twins()
    for _ in range(COUNT):
        fail(twins)
        twins.run()
        fail_late(twins)
    twins.run()


def test_gradients_of_an_update_that_is_not_wanted_are_dropped() -> None:
    twins = Twins()
    for _ in range(COUNT + 2):
        twins.run()
    twins.step.drop_micro_batches()
    twins.other.zero_grad()
    twins.number = COUNT
    for _ in range(COUNT):
        twins.run()
    assert twins.step.steps == 2


def test_a_state_is_that_of_an_update_and_a_load_begins_after_it() -> None:
    twins = Twins()
    for _ in range(COUNT):
        twins.run()
    state = copy.deepcopy(twins.step.state_dict())
    for _ in range(2):
        twins.run()
        with pytest.raises(cf.CheckpointError, match="of 3 micro-batches .*drop_micro_batches"):
            twins.step.state_dict()
    twins.step.load_state_dict(state)
    twins.twin.load_state_dict(state["model"])
    twins.other.zero_grad()
    twins.number = COUNT
    for _ in range(COUNT):
        twins.run()
    assert twins.step.steps == 2


def test_a_parameter_that_the_last_micro_batch_does_not_reach_is_not_forgotten() -> None:
    twins = Twins()
    for _ in range(2):
        twins.run()
    before = copy.deepcopy(twins.model.state_dict())
    twins.model.skips = True
    with pytest.raises(cf.CaptureError, match=r"last of 3 .* no gradient of last\.weight, last\.bias.*drop_micro_b"):
        twins.step(*batch(60))
    torch.testing.assert_close(dict(twins.model.state_dict()), dict(before))
    twins.model.skips = False
    twins.run()
    assert twins.step.steps == 1


def test_what_grad_holds_is_the_users() -> None:
    twins = Twins()
    for param in twins.model.parameters():
        param.grad = torch.ones_like(param)
    for number in range(COUNT):
        twins.step(*batch(number))
    assert all(param.grad is not None and bool((param.grad == 1).all()) for param in twins.model.parameters())


def test_a_step_that_is_captured() -> None:
    """Both kinds of calls become graphs."""
    pair = Pair(accumulate_steps=COUNT)
    for number in range(8 * COUNT):
        pair.run(number)
    assert len(pair.recorder.recordings) == 2 and all(count > 2 for count in pair.recorder.replays)


def test_compute_that_inductor_compiles() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    step = cf.compile(
        model, loss_fn=F.cross_entropy, optimizer=optimizer, backend="inductor", accumulate_steps=2, clip_grad_norm=0.1
    )
    for number in range(4):
        x, y = batch(number)
        step(x.double(), y)
        (F.cross_entropy(twin(x.double()), y) / 2).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
            other.step()
            other.zero_grad()
    torch.testing.assert_close(dict(model.named_parameters()), dict(twin.named_parameters()), rtol=1e-10, atol=1e-10)


def test_a_step_that_updates_in_every_call_has_no_other_graph() -> None:
    model = nn.Linear(4, 3)
    step = cf.compile(model, loss_fn=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(cf.ConfigValueError, match=r"lower_micro_batch\(\).*accumulate_steps=1.*use lower\(\)"):
        step.lower_micro_batch(*batch(0))
    step(*batch(0))
    assert step.steps == 1
