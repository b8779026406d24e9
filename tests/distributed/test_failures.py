"""Whatever goes wrong on one rank ends on every rank with a clear error, soon, and leaves the model whole."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import commfuse_fx as cf
from tests.distributed.harness import SOON, Ranks, run_soon
from tests.distributed.models_of_ranks import (
    OFF,
    adamw,
    assert_same,
    compiled,
    digest,
    mlp,
    momentum,
    snapshot,
    xy,
)
from tests.distributed.programs import run_programs
from tests.logs import logged

# One rank fails and all go on


def _bad(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = xy(1)
    if kind == "target":
        return x, y + 7
    return x[:, :5], y


def one_bad_batch(kind: str, when: int, options: dict[str, Any]) -> tuple[str, str]:
    """Step number `when` fails on rank 1. Returns the error and a digest after three good steps in all."""
    model = mlp()
    optimizer = adamw(model)
    step = compiled(model, optimizer, **options)
    error = ""
    for number in range(3):
        if number == when:
            before = snapshot(model, optimizer)
            random = torch.get_rng_state()
            try:
                step(*(_bad(kind) if dist.get_rank() == 1 else xy(1)))
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
            assert_same(snapshot(model, optimizer), before)
            assert torch.equal(torch.get_rng_state(), random)
            assert all(param.grad is None for param in model.parameters())
        step(*xy(number))
    undisturbed = mlp()
    reference = adamw(undisturbed)
    step = compiled(undisturbed, reference, **options)
    for number in range(3):
        step(*xy(number))
    assert_same(snapshot(model, optimizer), snapshot(undisturbed, reference))
    return error, digest(model)


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize(
    ("kind", "options", "own"),
    [
        ("target", {}, "IndexError: Target"),
        ("target", {"parameter_broadcast": True}, "IndexError: Target"),
        ("shape", {}, "RuntimeError: "),
        ("shape", {"parameter_broadcast": True, "comm_fusion": OFF}, "RuntimeError: "),
    ],
)
def test_a_bad_batch_on_one_rank_changes_nothing_on_any(
    ranks: Ranks, kind: str, when: int, options: dict[str, Any], own: str
) -> None:
    good, bad = run_soon(ranks, one_bad_batch, kind, when, options)
    assert good.ok, good.details
    assert bad.ok, bad.details
    assert bad.value[0].startswith(own)
    assert good.value[0].startswith("PeerFailedError: ")
    assert f"rank 1: {own}" in good.value[0]
    assert good.value[1] == bad.value[1]


def bad_first_batch_warns() -> list[str]:
    model = mlp()
    step = compiled(model, momentum(model))
    own_error = dist.get_rank() == 1
    with logged() as messages:
        with pytest.raises(RuntimeError if own_error else cf.PeerFailedError):
            step(*(_bad("shape") if own_error else xy(1)))
        step(*xy(0))
    return messages


def test_a_failed_first_step_does_not_look_like_different_parameters(ranks: Ranks) -> None:
    for messages in ranks.values(bad_first_batch_warns):
        assert not [text for text in messages if "parameters differ" in text]


def bad_first_batch_on_rank_0() -> float:
    """A divided model with dropout: its ranks need a number of rank 0 to draw masks, and so before they vote."""
    model = nn.Sequential(mlp(), nn.Dropout(0.5))
    step = compiled(model, momentum(model), parallel_mode="semi_auto", mesh=(2,))
    random = torch.get_rng_state()
    own_error = dist.get_rank() == 0
    with pytest.raises(RuntimeError if own_error else cf.PeerFailedError):
        step(*(_bad("shape") if own_error else xy(1)))
    if own_error:
        assert torch.equal(torch.get_rng_state(), random)
    return float(step(*xy(0)).detach())


def test_ranks_that_wait_for_a_seed_hear_of_a_failure(ranks: Ranks) -> None:
    one, other = run_soon(ranks, bad_first_batch_on_rank_0)
    assert one.ok, one.details
    assert other.ok, other.details
    assert one.value == other.value


# Ranks that die


@contextmanager
def _dying_at(call: int) -> Iterator[None]:
    """Rank 1 is killed as it issues its collective number `call`: number 1 is the vote, the others are all_reduces."""
    issued = 0

    def counting(collective: Callable[..., Any]) -> Callable[..., Any]:
        def issue(*args: Any, **kwargs: Any) -> Any:
            nonlocal issued
            issued += 1
            if issued == call and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return collective(*args, **kwargs)

        return issue

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counting(dist.all_to_all_single))
        patch.setattr(dist, "all_reduce", counting(dist.all_reduce))
        yield


def killed(call: int) -> list[str]:
    model = mlp()
    optimizer = adamw(model)
    step = compiled(model, optimizer, comm_fusion=OFF)
    step(*xy(0))
    before = snapshot(model, optimizer)
    errors = []
    with _dying_at(call):
        for number in (1, 2):
            try:
                step(*xy(number))
            except cf.CollectiveError as error:
                errors.append(str(error))
            assert_same(snapshot(model, optimizer), before)
    return errors


@pytest.mark.parametrize(
    ("call", "size", "named"),
    [
        (1, 2, "the agreement before the first collective of the step failed"),
        (1, 4, "the agreement before the first collective of the step failed"),
        (4, 2, "all_reduce"),
        (3, 4, "all_reduce"),
    ],
)
def test_a_killed_rank_ends_the_step_on_the_others(ranks: Ranks, call: int, size: int, named: str) -> None:
    outcomes = run_soon(ranks, killed, call, size=size)
    assert outcomes[1].died == -signal.SIGKILL
    for outcome in outcomes[:1] + outcomes[2:]:
        assert outcome.ok, outcome.details
        error, again = outcome.value
        assert named in error
        if call > 1:
            assert "group=" in error
            assert "members=[" in error
        assert "start all ranks again" in again


def raise_outside() -> None:
    model = mlp()
    step = compiled(model, momentum(model))
    step(*xy(0))
    if dist.get_rank() == 1:
        os._exit(3)  # what an uncaught exception in the training script comes to
    step(*xy(1))


def test_a_rank_that_exits_between_steps(ranks: Ranks) -> None:
    first, gone, last = run_soon(ranks, raise_outside, size=3)
    assert gone.died == 3
    for alive in (first, last):
        assert alive.error.startswith("CollectiveError: "), alive.details
        assert "before the first collective" in alive.error
        assert (
            re.search("no vote has come from ranks? .*1", alive.error)
            and "has ended, or has destroyed its process group" in alive.error
        )
        waited = re.search(r"has closed after ([0-9.]+) s", alive.error)
        assert waited and float(waited[1]) < 60 and "time-out" not in alive.error


# Leaving a step on which the ranks had agreed

_library = torch.library.Library("commfuse_test", "DEF")
_library.define("interrupt(Tensor x) -> Tensor")

_script: list[str] = []
"""What the next calls of `interrupt` do, one after another."""


@torch.library.impl(_library, "interrupt", "CompositeExplicitAutograd")
def _(x: torch.Tensor) -> torch.Tensor:
    what = _script.pop(0) if _script else "pass"
    if what == "raise":
        raise MemoryError("no room left")
    if what == "signal":
        os.kill(os.getpid(), signal.SIGINT)
    return x.clone()


@torch.library.register_fake("commfuse_test::interrupt", lib=_library)
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


torch.library.register_autograd("commfuse_test::interrupt", lambda ctx, grad: _interrupt(grad), lib=_library)


def _interrupt(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.commfuse_test.interrupt(x)
    return out


class Interruptible(nn.Module):
    """Runs `interrupt` in its forward and in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(_interrupt(self.inner(x)))
        return out


def leave_in_the_backward() -> list[str]:
    model = Interruptible()
    step = compiled(model, momentum(model), comm_fusion=OFF)
    other_model = mlp()
    other = compiled(other_model, momentum(other_model))
    step(*xy(0))
    before = snapshot(model)
    errors = []
    if dist.get_rank() == 1:
        _script.extend(["pass", "raise"])
    for number, called in ((1, step), (2, step), (3, other)):
        try:
            called(*xy(number))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        assert_same(snapshot(model), before)
    # The connections of the rank that left stay open until the other one has been told.
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["told"], timedelta(seconds=SOON))
    else:
        store.set("told", "")
    return errors


def test_a_rank_that_leaves_an_agreed_step_is_not_waited_for(ranks: Ranks) -> None:
    peer, left = run_soon(ranks, leave_in_the_backward)
    assert left.ok, left.details
    assert left.value[0].startswith("MemoryError: no room left")
    for error in left.value[1:]:  # from another compiled step, too
        assert "(MemoryError), so the ranks are no longer at the same place" in error
    assert peer.ok, peer.details
    assert peer.value[0].startswith("CollectiveError: rank 0: reduce/"), peer.value
    assert "members=[" in peer.value[0]
    assert "rank 1: MemoryError: no room left" in peer.value[0]
    for error in peer.value[1:]:
        assert "start all ranks again" in error


def uncaught() -> None:
    """A script of its own: nobody catches anything."""
    cf.init(timeout=60)
    model = Interruptible()
    step = compiled(model, momentum(model), comm_fusion=OFF)
    _script.extend(["pass", "raise"] if dist.get_rank() == 1 else [])
    step(*xy(0))


def test_processes_end_soon_after_an_uncaught_error(ranks: Ranks, tmp_path: Path) -> None:
    """The end of a process destroys its groups, which must not wait for the other rank either."""
    ended = run_programs(ranks, uncaught, files=tmp_path, folder=tmp_path)
    assert [each.code for each in ended] == [1, 1]
    said = [each.err for each in ended]
    assert "CollectiveError: rank 0: reduce/" in said[0]
    assert "MemoryError: no room left" in said[1]
    assert not any(what in text for text in said for what in ("commfuse_fx/", "Exception ignored"))


class _StepThatInterrupts(torch.optim.SGD):
    """Not a class that the compiler knows, so its own step() is called."""

    armed = False

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for number, param in enumerate(group["params"]):
                if number == 2 and self.armed:
                    os.kill(os.getpid(), signal.SIGINT)
                if param.grad is not None:
                    param.data.sub_(param.grad, alpha=group["lr"])


def interrupted_in(what: str) -> None:
    model = Interruptible()
    optimizer = adamw(model)
    step = compiled(model, optimizer)
    if what != "trace":
        step(*xy(0, rank=0))
    before = snapshot(model, optimizer)
    if what == "trace":
        handle = model.register_forward_pre_hook(lambda module, args: os.kill(os.getpid(), signal.SIGINT))
    else:
        _script.extend(["signal"] if what == "forward" else ["pass", "signal"])
    with pytest.raises(KeyboardInterrupt):
        step(*xy(0, rank=0))
    assert_same(snapshot(model, optimizer), before)
    if what == "trace":
        handle.remove()
        step(*xy(0, rank=0))
    step(*xy(1, rank=0))

    other = Interruptible()
    reference = adamw(other)
    step = compiled(other, reference)
    for number in range(2):
        step(*xy(number, rank=0))
    assert_same(snapshot(model, optimizer), snapshot(other, reference))


def interrupted_in_update() -> None:
    model, alone = mlp(), mlp()
    optimizer = _StepThatInterrupts(model.parameters(), lr=0.1)
    step = compiled(model, optimizer)
    optimizer.armed = True
    with pytest.raises(KeyboardInterrupt):
        step(*xy(0, rank=0))
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    x, y = xy(0, rank=0)
    F.cross_entropy(alone(x), y).backward()
    plain.step()
    torch.testing.assert_close(dict(model.named_parameters()), dict(alone.named_parameters()))


@pytest.mark.parametrize("where", ["trace", "forward", "backward"])
def test_ctrl_c_before_the_update_changes_nothing(ranks: Ranks, where: str) -> None:
    ranks.values(interrupted_in, where, size=1)


def test_ctrl_c_in_the_update_waits_for_its_end(ranks: Ranks) -> None:
    ranks.values(interrupted_in_update, size=1)
