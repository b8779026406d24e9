"""What a change of the learning rate or of another hyper-parameter does to steps that run from a capture."""

from __future__ import annotations

import copy
import logging
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.runtime.execute.cuda_graphs.step_graphs import FIRST
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


def optimizers(lr: float) -> dict[str, Make]:
    """One of each kind, with all that its kernel can do."""
    made: dict[str, Make] = {
        "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=lr, amsgrad=True, weight_decay=0.1),
        "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1),
        "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=lr, lr_decay=0.1),
        "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5, nesterov=True),
        "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=lr),
        "RMSprop with all": lambda model: torch.optim.RMSprop(
            model.parameters(), lr=lr, momentum=0.5, centered=True, weight_decay=0.1, maximize=True
        ),
        "NAdam": lambda model: torch.optim.NAdam(
            model.parameters(), lr=lr, weight_decay=0.1, decoupled_weight_decay=True
        ),
        "RAdam": lambda model: torch.optim.RAdam(
            model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.1, decoupled_weight_decay=True
        ),
        "Adamax": lambda model: torch.optim.Adamax(model.parameters(), lr=lr),
        "Adadelta": lambda model: torch.optim.Adadelta(model.parameters(), lr=lr),
        "ASGD": lambda model: torch.optim.ASGD(model.parameters(), lr=lr, lambd=0.1, t0=2),
    }
    return made


OWN = {"NAdam", "RAdam", "Adamax", "Adadelta", "ASGD"}
"""Updates of which one op does everything, at a rate of any dtype in memory, too."""

KINDS = [
    *((name, torch.float64, 1e-14) for name in optimizers(0.01)),
    *((name, torch.float32, 1e-6) for name in ("RMSprop", "RMSprop with all", *sorted(OWN))),
    ("RMSprop", torch.bfloat16, 0.02),
]
"""Updates without a fused kernel that takes the rate from memory as it is, and how far from eager they may come."""


@pytest.mark.parametrize(("name", "dtype", "close"), KINDS, ids=str)
@pytest.mark.parametrize("is_scheduled", [True, False])
def test_a_rate_acts_without_another_capture_in_updates_that_take_a_number(
    name: str, dtype: torch.dtype, close: float, is_scheduled: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)
    twin = copy.deepcopy(model)
    ours, theirs = (optimizers(0.01)[name](net) for net in (model, twin))
    rates = [torch.optim.lr_scheduler.ExponentialLR(each, 0.7) for each in (ours, theirs)] if is_scheduled else []
    step = cf.compile(model, loss_fn=F.cross_entropy, optimizer=ours)
    recorder = recorded(step)
    assert step.session.graphs is not None
    step.session.graphs._always = True
    for number in range(9):
        x, y = batch(number)
        step(x.to(dtype), y)
        theirs.zero_grad()
        F.cross_entropy(twin(x.to(dtype)), y).backward()
        theirs.step()
        for rate in rates:
            rate.step()
        if not is_scheduled and number > 3:
            for optimizer in (ours, theirs):
                optimizer.param_groups[0]["lr"] *= 0.7
    torch.testing.assert_close([*model.parameters()], [*twin.parameters()], rtol=close, atol=close)
    assert recorder.replays == ([8] if is_scheduled else [4, 4])
    ops = {str(op) for op, *_ in recorder.recordings[-1]._tape.calls}
    if name in OWN:
        assert f"commfuse.{name.lower()}_.tensor_lr" in ops
    else:
        assert "aten.lerp.Tensor" in ops and not any("tensor_lr" in op for op in ops), "whose rates are of float32"


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
