"""Steps that several threads call, and tracing beside other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from commfuse_fx.runtime.ranks.callers import making_a_step
from commfuse_fx.votes import together
from tests.distributed.harness import Ranks, run_soon
from tests.distributed.models_of_ranks import assert_same, mlp, momentum, snapshot, xy
from tests.distributed.test_forks import in_fork

ACROSS = {"schedule": cf.ScheduleConfig(across_steps=True), "cluster": "default"}
LIMIT = 60.0

pytestmark = pytest.mark.dist


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """What they return, or the errors that they raise, each in a thread of its own that begins when all are there."""
    gate = threading.Barrier(len(functions))
    found: list[Any] = [None] * len(functions)

    def run(number: int, function: Callable[[], Any]) -> None:
        gate.wait(LIMIT)
        try:
            found[number] = function()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "a thread hangs"
    return found


def normed_mlp(seed: int) -> nn.Module:
    model = mlp(seed=seed)
    return nn.Sequential(model[0], nn.BatchNorm1d(32), model[2], model[4])


def make(seed: int, build: Callable[..., nn.Module] = mlp, **options: Any) -> cf.CompiledStep:
    model = build(seed=seed)
    return cf.compile(model, loss_fn=F.cross_entropy, optimizer=momentum(model), **options)


def calls(step: cf.CompiledStep, count: int, first: int = 0, rank: int | None = None) -> list[float]:
    return [float(step(*xy(first + number, rank))) for number in range(count)]


def state(step: cf.CompiledStep) -> dict[str, Any]:
    assert step.optimizer is not None
    return snapshot(step.model, step.optimizer)


# One process


def test_first_calls_of_two_steps():
    steps = [make(seed, normed_mlp) for seed in (1, 2, 3)]
    found = at_once(*(lambda step=step: calls(step, 3, rank=0) for step in steps))
    for seed, step, losses in zip((1, 2, 3), steps, found, strict=True):
        alone = make(seed, normed_mlp)
        assert losses == calls(alone, 3, rank=0)
        assert_same(state(step), state(alone))


def test_first_calls_of_one_step():
    step, alone = make(1), make(1)
    found = at_once(*(lambda: calls(step, 2, rank=0),) * 3, lambda: step.lower(*xy(0, 0)).fingerprint)
    want = [float(alone(*xy(number, 0))) for number in (0, 0, 0, 1, 1, 1)]
    assert found[3] == alone.lower(*xy(0, 0)).fingerprint
    assert all(isinstance(losses, list) for losses in found[:3]), found
    assert len([*found[0], *found[1], *found[2]]) == len(want)


def test_training_and_evaluation_of_one_model():
    model = normed_mlp(1)
    step = cf.compile(model, loss_fn=F.cross_entropy, optimizer=momentum(model))
    other = cf.compile(model, loss_fn=F.cross_entropy)
    (losses, grads) = at_once(lambda: calls(step, 4, rank=0), lambda: calls(other, 4, rank=0))
    assert len(losses) == len(grads) == 4


class Slow(nn.Module):
    """Lets another thread work while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 4), nn.BatchNorm1d(4)
        self.traced, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.traced.set()
        assert self.go_on.wait(LIMIT)
        return self.norm(self.layer(x))


def eager_work() -> list[torch.Tensor]:
    """What tracing replaces in torch: generators, checks of arguments, layers, losses, hooks."""
    random = torch.get_rng_state()
    generator = torch.random.get_rng_state()
    assert torch.equal(random, generator)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.Dropout(0.5), nn.Linear(8, 5))
    drawn = model(torch.randn(6, 4))
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 2, 4), torch.tensor([3, 2]))
    lengths = torch.tensor([4, 4])
    ctc = F.ctc_loss(torch.randn(6, 2, 5).log_softmax(2), torch.ones(2, 4, dtype=torch.long), lengths + 2, lengths)
    with pytest.raises(ValueError):
        torch.distributions.Normal(0.0, torch.tensor(-1.0))
    drawn.sum().backward()
    torch.set_rng_state(random)
    return [drawn.detach(), packed.data, ctc, model[0].weight.grad, model[1].running_var]


def test_eager_work_beside_a_trace(monkeypatch: pytest.MonkeyPatch):
    # torch.compile, which an earlier test may have called, switches this off for the whole process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    want = eager_work()
    model = Slow()
    step = cf.compile(model, loss_fn=F.cross_entropy)

    def beside() -> list[torch.Tensor]:
        assert model.traced.wait(LIMIT)
        try:
            return eager_work()
        finally:
            model.go_on.set()

    loss, have = at_once(lambda: step(*xy(0, 0)), beside)
    assert isinstance(loss, torch.Tensor), loss
    assert isinstance(have, list), have
    for one, two in zip(have, want, strict=True):
        assert torch.equal(one, two)


def test_two_threads_that_compile_for_several_ranks_are_refused():
    inside, done = threading.Event(), threading.Event()

    def first() -> str:
        with making_a_step():
            inside.set()
            assert done.wait(LIMIT)
        return "made"

    def second() -> None:
        assert inside.wait(LIMIT)
        try:
            with making_a_step():
                pass
        finally:
            done.set()

    made, refused = at_once(first, second)
    assert made == "made" and isinstance(refused, cf.CommFuseError) and "cf.compile()" in str(refused)
    with making_a_step():
        pass


def test_a_fork_beside_a_trace_has_the_parameters():
    model = Slow()
    want = float(model.layer.weight.detach().norm())
    step = cf.compile(model, loss_fn=F.cross_entropy)

    def beside() -> Any:
        assert model.traced.wait(LIMIT)
        threading.Timer(0.2, model.go_on.set).start()
        return in_fork(lambda: float(model.layer.weight.detach().norm()))

    _, found = at_once(lambda: step(*xy(0, 0)), beside)
    assert found == want


# Several ranks


def in_other_orders(options: dict[str, Any], calls_of_each: int) -> tuple[list[Any], list[dict[str, Any]]]:
    """Each of two threads trains a model; the ranks begin with different ones."""
    steps = [make(seed, normed_mlp, **options) for seed in (1, 2)]
    late = steps[dist.get_rank()]
    begun = threading.Event()

    def train(step: cf.CompiledStep) -> list[float]:
        losses = []
        for number in range(calls_of_each):
            if step is late and not number:
                begun.wait(2.0)
            else:
                begun.set()
            losses.append(float(step(*xy(number))))
        return losses

    found = at_once(*(lambda step=step: train(step) for step in steps))
    return found, [state(step) for step in steps]


def one_after_the_other(options: dict[str, Any], calls_of_each: int) -> tuple[list[Any], list[dict[str, Any]]]:
    steps = [make(seed, normed_mlp, **options) for seed in (1, 2)]
    return [calls(step, calls_of_each) for step in steps], [state(step) for step in steps]


@pytest.mark.parametrize("options", [{}, ACROSS], ids=["", "across"])
def test_two_steps_in_two_threads(ranks: Ranks, options: dict[str, Any]):
    want = ranks.values(one_after_the_other, options, 12)
    for (losses, states), (expected, final) in zip(ranks.values(in_other_orders, options, 12), want, strict=True):
        assert losses == expected
        for have, wanted in zip(states, final, strict=True):
            assert_same(have, wanted)


def one_step_in_threads() -> tuple[list[Any], dict[str, Any]]:
    step = make(1)
    return at_once(*(lambda: calls(step, 4),) * 2), state(step)


def test_one_step_in_two_threads(ranks: Ranks):
    (one, first), (two, second) = ranks.values(one_step_in_threads)
    assert all(isinstance(losses, list) for losses in (*one, *two)), (one, two)
    assert_same(first, second)


def never_called() -> str:
    """Rank 1 has a thread that might call what rank 0 calls, and does not."""
    steps = [make(seed) for seed in (1, 2)]
    called, stop = threading.Event(), threading.Event()

    def other() -> None:
        calls(steps[1], 1)
        called.set()
        stop.wait(LIMIT)

    thread = threading.Thread(target=other)
    thread.start()
    called.wait(LIMIT)
    try:
        with mock.patch.object(together, "LONGEST_WAIT", timedelta(seconds=1)):
            calls(steps[dist.get_rank()], 1)
    except cf.CommFuseError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        stop.set()
        thread.join()
    return ""


def test_what_has_no_order_ends_with_the_reason(ranks: Ranks):
    first, second = run_soon(ranks, never_called)
    assert first.value.startswith("PeerFailedError: ") and "rank 1: CommFuseError: rank 0 has called" in first.value
    assert second.value.startswith("CommFuseError: rank 0 has called compiled step 1")
