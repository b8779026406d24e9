"""Steps that run from a capture do what steps without one do; when they are captured, and what ends a capture."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import commfuse_fx as cf
from commfuse_fx.runtime.execute.cuda_graphs import step_graphs
from commfuse_fx.runtime.execute.cuda_graphs.step_graphs import FIRST
from tests.recorders import recorded
from tests.runtime.captured_pairs import RATE, Make, Net, Pair, adamw, batch, sgd


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "commfuse_fx.cuda_graphs")
    return caplog


@pytest.mark.parametrize("limit", [None, 0.1])
@pytest.mark.parametrize(
    "make",
    [
        adamw,
        sgd,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adadelta,
        torch.optim.ASGD,
        torch.optim.Rprop,
    ],
    ids=lambda make: make.__name__,
)
def test_a_captured_step_does_what_a_plain_one_does(make: Any, limit: float | None) -> None:
    made = make if make in (adamw, sgd) else lambda model: make(model.parameters(), lr=RATE)
    pair = Pair(made, clip_grad_norm=limit)
    losses = [pair.run(number) for number in range(8)]
    assert pair.recorder.replays == [8 - FIRST]
    assert len({float(loss) for loss in losses}) == 8, "each loss is the caller's to keep"
    assert not any(loss.requires_grad for loss in losses)


def test_parameters_written_in_place_are_seen_and_replaced_ones_are_captured_anew(
    logged: pytest.LogCaptureFixture,
) -> None:
    pair = Pair().captured()
    with torch.no_grad():
        for model in (pair.model, pair.twin):
            model.first.weight.mul_(0.5)
            model.norm.running_mean.add_(1)
    pair.run(10)
    assert pair.recorder.replays == [2]
    for model in (pair.model, pair.twin):
        model.first.weight.data = model.first.weight.data * 2
    for number in range(20):
        pair.run(number)
    assert len(pair.recorder.recordings) == 2 and pair.recorder.recordings[0].is_closed
    assert "parameter first.weight lies elsewhere in memory" in logged.text


def test_a_replaced_parameter_object_is_captured_anew(logged: pytest.LogCaptureFixture) -> None:
    pair = Pair(None).captured()
    for model in (pair.model, pair.twin):
        model.first.weight = nn.Parameter(model.first.weight.detach() * 2)
    for number in range(FIRST + 1):
        pair.run(number)
    assert len(pair.recorder.recordings) == 2 and pair.recorder.recordings[0].is_closed
    assert "a captured step goes: a parameter of the model was replaced" in logged.text


def test_loaded_states_act() -> None:
    pair = Pair().captured()
    assert pair.optimizer is not None and pair.other is not None
    saved = copy.deepcopy((pair.model.state_dict(), pair.optimizer.state_dict()))
    first = [float(pair.run(number)) for number in range(3)]
    for model, optimizer in ((pair.model, pair.optimizer), (pair.twin, pair.other)):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
    torch.manual_seed(5)
    again = [float(pair.run(number)) for number in range(12)]
    assert len(first) == 3 and len(pair.recorder.recordings) == 2, "the optimizer has other tensors now"
    assert len(set(again)) == 12


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("make", [adamw, sgd])
def test_states_that_the_user_replaces_go_on_from_there(make: Make, always: bool) -> None:
    pair = Pair(make, always=always)
    for number in range(FIRST + 1):
        pair.run(number)
    for optimizer in (pair.optimizer, pair.other):
        assert optimizer is not None
        for param, held in list(optimizer.state.items()):
            optimizer.state[param] = {name: value + 0.25 for name, value in held.items()}
    for number in range(3):
        pair.run(number)
    for optimizer in (pair.optimizer, pair.other):
        assert optimizer is not None
        optimizer.state.clear()
    for number in range(3):
        pair.run(number)
    mine, theirs = (each.state_dict()["state"] for each in (pair.optimizer, pair.other) if each is not None)
    for one, other in zip(mine.values(), theirs.values(), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_masks_are_drawn_again_from_a_restored_generator() -> None:
    pair = Pair().captured()
    state, weights = torch.get_rng_state(), copy.deepcopy(pair.model.state_dict())
    one = pair.run(0)
    torch.set_rng_state(state)
    for model in (pair.model, pair.twin):
        model.load_state_dict(weights)
    assert torch.equal(pair.run(0), one)
    torch.manual_seed(77)
    for model in (pair.model, pair.twin):
        model.load_state_dict(weights)
    assert not torch.equal(pair.run(0), one)
    assert pair.recorder.replays == [4]


def test_gradients_are_the_callers() -> None:
    pair = Pair(None)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(10):
        pair.run(number)
        grad = pair.model.first.weight.grad
        assert grad is not None
        if number % 3 == 1:  # two steps add up, and a third follows on nothing
            kept.append((grad, grad.clone()))
            for model in (pair.model, pair.twin):
                model.zero_grad(set_to_none=True)
    assert pair.recorder.replays == [10 - FIRST]
    assert all(torch.equal(grad, before) for grad, before in kept)


def test_evaluation_and_eager_forwards_between_steps() -> None:
    pair = Pair().captured()
    for number in range(4):
        for model in (pair.model, pair.twin):
            model.eval()
        pair.run(number)
        assert torch.equal(pair.model(batch(0)[0]), pair.twin(batch(0)[0]))
        for model in (pair.model, pair.twin):
            model.train()
        pair.run(number)
    assert pair.recorder.replays == [5]


def test_auxiliary_outputs_are_the_callers() -> None:
    def loss_fn(out: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return F.cross_entropy(out, target), {"out": out, "top": out.argmax(-1)}

    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    step = cf.compile(model, loss_fn=loss_fn, optimizer=adamw(model), has_aux=True)
    recorder = recorded(step)
    kept = []
    for number in range(FIRST + 3):
        _, aux = step(*batch(number))
        kept.append((aux, copy.deepcopy(aux)))
    assert recorder.replays == [3]
    for aux, before in kept:
        assert torch.equal(aux["out"], before["out"]) and torch.equal(aux["out"].argmax(-1), aux["top"])


def test_further_shapes_are_captured_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "MOST", 2)
    pair = Pair(sgd, nn.Linear(4, 3))
    for rows in range(2, 5):
        for number in range(FIRST + 1):
            pair.run(number, rows)
    recordings = pair.recorder.recordings
    assert [each.is_closed for each in recordings] == [True, False, False]
    pair.run(0, 3)  # used again, so the other one is the oldest
    for number in range(FIRST + 1):
        pair.run(number, 5)
    assert [each.is_closed for each in recordings] == [True, False, True, False]
    assert recordings[1].replays == 2


def test_an_error_in_capture_leaves_the_step_as_it_was(logged: pytest.LogCaptureFixture) -> None:
    pair = Pair()
    pair.recorder.error = RuntimeError("operation not permitted when stream is capturing")
    for number in range(FIRST + 3):
        pair.run(number)
    warnings = [record.getMessage() for record in logged.records if record.levelname == "WARNING"]
    assert warnings == [
        "steps run without CUDA graphs from here on: capturing one failed [RuntimeError: operation not permitted when "
        "stream is capturing]"
    ]


def test_an_error_in_capture_reaches_who_asks_for_graphs() -> None:
    pair = Pair(always=True)
    pair.run(0)
    before = copy.deepcopy(pair.model.state_dict())
    pair.recorder.error = RuntimeError("not permitted")
    with pytest.raises(cf.NotAvailableError, match=r"cuda_graph=True: capturing the step failed.*not permitted"):
        pair.step(*batch(1))
    assert all(torch.equal(before[name], value) for name, value in pair.model.state_dict().items())
    pair.recorder.error = None
    pair.run(1)
    assert pair.recorder.replays == [1]


def test_a_failed_step_ends_captures(logged: pytest.LogCaptureFixture) -> None:
    pair = Pair().captured()
    executor = pair.step.session.running
    assert executor is not None
    executor.storage.pool.forget_memory()
    for number in range(8):
        pair.run(number)
    assert len(pair.recorder.recordings) == 2 and "a step has failed" in logged.text


def test_nothing_is_captured_while_somebody_looks_at_ops() -> None:
    pair = Pair().captured()
    pair.recorder.is_busy = True
    pair.run(5)
    pair.recorder.is_busy = False
    with FlopCounterMode(display=False) as counter:
        pair.step(*batch(6))
    assert counter.get_total_flops() > 0 and pair.recorder.replays == [1]


def test_measurements_run_without_captures() -> None:
    pair = Pair().captured()
    pair.step.profile(*batch(0), rounds=1)
    with pair.step.record_communication():
        pair.run(7)
    assert pair.recorder.replays == [1]


def test_nothing_is_captured_where_memory_is_short(logged: pytest.LogCaptureFixture) -> None:
    pair = Pair()
    pair.recorder.is_full = True
    for number in range(2 * FIRST):
        pair.run(number)
    assert pair.recorder.recordings == [] and logged.text.count("it would keep so much memory") == 1
    pair.recorder.is_full = False
    for number in range(2 * FIRST):
        pair.run(number)
    assert pair.recorder.replays == [FIRST]


class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x.mul_(2))
        return out


class Odd(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("model", "make", "why"),
    [
        (WritesInput, adamw, "the model writes to its input input.0"),
        (Net, lambda model: Odd(model.parameters(), lr=0.1), r"the optimizer's own step\(\) makes the update"),
    ],
    ids=["input", "optimizer"],
)
def test_what_cannot_be_captured(
    model: type[nn.Module], make: Make, why: str, logged: pytest.LogCaptureFixture
) -> None:
    pair = Pair(make, model())
    for number in range(FIRST + 2):
        pair.step(*batch(number))
    assert pair.recorder.recordings == [] and "a step runs without a CUDA graph: " in logged.text
    with pytest.raises(cf.NotAvailableError, match=f'cuda_graph=True: {why}; pass cuda_graph="auto"'):
        Pair(make, model(), always=True).step(*batch(0))


def test_copies_of_a_step_capture_their_own() -> None:
    pair = Pair().captured()
    other = copy.deepcopy(pair.step)
    assert other.session.graphs is None
    other(*batch(0))
    assert pair.recorder.replays == [1]


@pytest.mark.parametrize("captures", [True, False])
def test_a_closed_step(captures: bool) -> None:
    pair = Pair()
    if captures:
        pair.captured()
    else:
        pair.step.session.graphs = None
        pair.step(*batch(0))
    for _ in range(2):
        pair.step.close()
    assert all(each.is_closed for each in pair.recorder.recordings)
    with pytest.raises(cf.CommFuseError, match="this step is closed"):
        pair.step(*batch(0))
    pair.step.synchronize()
    again = cf.compile(pair.model, loss_fn=F.cross_entropy, optimizer=pair.optimizer)
    assert torch.isfinite(again(*batch(1)))


def test_a_capture_goes_when_its_last_launch_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stream is the current one by then: marks are made at launches only."""
    looks: list[int] = []

    def mark(launch: int) -> Callable[[], bool]:
        return lambda: looks.append(launch) or len(looks) > 2

    pair = Pair()
    launches = iter(range(100))
    monkeypatch.setattr(pair.recorder, "mark", lambda: mark(next(launches)))
    pair.captured().run(FIRST + 1)
    assert not looks
    pair.step.close()
    assert looks == [1, 1, 1] and pair.recorder.recordings[0].is_closed


class Moving(nn.Module):
    """Moves its batch, with and without waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        moved = x.to("cpu", torch.float64, non_blocking=True)
        return F.cross_entropy(self.inner(moved), labels.to("cpu", torch.int64))


def test_a_batch_is_copied_as_the_model_moves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it might be overwritten before it has been read."""
    torch.manual_seed(0)
    model = Moving()
    step = cf.compile(model, optimizer=adamw(model), form="step")
    recorder = recorded(step, first=1)
    copied: list[tuple[torch.dtype, bool]] = []
    copy_into = torch.Tensor.copy_

    def spy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copied.append((source.dtype, non_blocking))
        return copy_into(self, source, non_blocking)

    for number in range(3):
        x, labels = batch(number)
        with monkeypatch.context() as patched:
            if number == 2:
                patched.setattr(torch.Tensor, "copy_", spy)
            step(x, labels.int())
    assert recorder.replays == [2]
    assert (torch.float32, True) in copied and (torch.int32, False) in copied
