"""What a change of the learning rate or of another hyper-parameter does to steps that run from a capture."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.runtime.execute.step_graphs import FIRST
from tests.recorders import recorded
from tests.runtime.captured_pairs import RATE, Make, Pair, adamw, batch, sgd


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "commfuse_fx.cuda_graphs")
    return caplog


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_scheduled_rate_acts_without_another_capture(backend: str) -> None:
    """The recorder sees ops and no code of Inductor, so regions run op by op here."""
    code = mock.Mock(side_effect=lambda module, examples: lambda given: module(*given))
    with mock.patch("torch._inductor.compile_fx.compile_fx", code):
        assert_a_scheduled_rate_acts(Pair(backend=backend))
    assert code.called == (backend == "inductor")


def assert_a_scheduled_rate_acts(pair: Pair) -> None:
    assert pair.optimizer is not None and pair.other is not None
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** max(step - 5, 0))
        for optimizer in (pair.optimizer, pair.other)
    ]
    for number in range(9):
        pair.run(number)
        for scheduler in schedulers:
            scheduler.step()
    assert pair.recorder.replays == [9 - FIRST]
    assert pair.optimizer.param_groups[0]["lr"] == RATE * 0.5**4, "the number stays a number"


def test_a_rate_that_the_user_writes_leads_to_one_more_capture(logged: pytest.LogCaptureFixture) -> None:
    pair = Pair().captured()
    assert pair.optimizer is not None and pair.other is not None
    for number in range(12):
        for optimizer in (pair.optimizer, pair.other):
            optimizer.param_groups[0]["lr"] = RATE / 2 ** (1 + number)
        pair.run(number)
    assert pair.recorder.replays[0] == 1 and len(pair.recorder.replays) == 2
    assert "lr of the optimizer's param group 0 varies, and is read from memory from now on" in logged.text


def test_a_rate_in_a_tensor_of_the_users_is_read_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(RATE)))
    assert pair.optimizer is not None and pair.other is not None
    reads = 0

    def read(self: torch.Tensor) -> float:
        nonlocal reads
        reads += 1
        return float(self.item())

    for number in range(8):
        given = batch(number)
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "__float__", read)
            state = torch.get_rng_state()
            pair.step(*given)
        torch.set_rng_state(state)
        assert not reads
        pair.plain(*given)
        for optimizer in (pair.optimizer, pair.other):
            optimizer.param_groups[0]["lr"].mul_(0.5)
    assert all(torch.equal(mine, pair.twin.state_dict()[name]) for name, mine in pair.model.state_dict().items())
    assert pair.recorder.replays == [8 - FIRST]


def test_a_rate_that_stays_is_not_rounded() -> None:
    pair = Pair(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))
    for number in range(FIRST + 3):
        pair.run(number)
    assert pair.recorder.replays == [3]


def test_float64_takes_the_rate_as_the_number_it_is(logged: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 3).double()
    step = cf.compile(model, loss_fn=F.cross_entropy, optimizer=(optimizer := adamw(model)))
    recorder = recorded(step)
    x, y = batch(0)
    for _ in range(FIRST + 1):
        step(x.double(), y)
    optimizer.param_groups[0]["lr"] = 0.1
    step(x.double(), y)
    assert recorder.replays == [1]
    assert f"lr of the optimizer's param group 0 is 0.1 in place of {RATE}" in logged.text


@pytest.mark.parametrize(("make", "cycles"), [(sgd, "momentum"), (adamw, "beta1")], ids=["SGD", "AdamW"])
def test_one_cycle_ends_graphs_after_three_captures_in_a_row(
    make: Make, cycles: str, logged: pytest.LogCaptureFixture
) -> None:
    pair = Pair(make)
    assert pair.optimizer is not None and pair.other is not None
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=RATE, total_steps=60, three_phase=True)
        for optimizer in (pair.optimizer, pair.other)
    ]
    for number in range(40):
        for optimizer in (pair.optimizer, pair.other):
            optimizer.param_groups[0]["lr"] = RATE  # the rest cycles, and float32 would round the rates
        pair.run(number)
        for scheduler in schedulers:
            scheduler.step()
    assert pair.recorder.replays == [1, 1, 1] and all(each.is_closed for each in pair.recorder.recordings)
    assert pair.graphs.ended.startswith(f"3 captures in a row have served one step each: {cycles} of the optimizer's")
    assert [record.levelname for record in logged.records].count("WARNING") == 1


def test_who_asks_for_graphs_gets_a_capture_for_each_change() -> None:
    pair = Pair(sgd, always=True)
    assert pair.optimizer is not None and pair.other is not None
    for number in range(6):
        for optimizer in (pair.optimizer, pair.other):
            optimizer.param_groups[0]["momentum"] = 0.1 * (number + 1)
        pair.run(number)
    assert pair.recorder.replays == [1] * 5 and not pair.graphs.ended
