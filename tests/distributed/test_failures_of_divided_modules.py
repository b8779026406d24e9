"""What goes wrong with modules whose parameters ranks divide: every rank hears of it, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commfuse_fx as cf
from commfuse_fx.runtime.execute.wire import messages
from tests.distributed.harness import Ranks, hurry, run_soon
from tests.distributed.test_divided_module import batch, divided, loss_of, sharded
from tests.odd_rows import WithSpare

pytestmark = pytest.mark.dist


def writes_between(net: Any, model: Any, optimizer: Any) -> None:
    loss = loss_of(model, 0)
    with torch.no_grad():
        net.back.weight.mul_(2)
    loss.backward()


def steps_between(net: Any, model: Any, optimizer: Any) -> None:
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


def reads_between(net: Any, model: Any, optimizer: Any) -> None:
    loss = loss_of(model, 0)
    net.back.weight.sum().item()
    loss.backward()
    optimizer.step()


def reads_too_late(net: Any, model: Any, optimizer: Any) -> None:
    loss_of(model, 0).backward()
    held = net.into.weight.grad
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    held.sum()


def fails_in_forward(net: Any, model: Any, optimizer: Any) -> None:
    x, _ = batch(0)
    model(x[:, : 12 - dist.get_rank()])


def fails_in_an_evaluation(net: Any, model: Any, optimizer: Any) -> None:
    loss_of(model, 0)
    with torch.no_grad():
        model(batch(0)[0][:, : 12 - dist.get_rank()])


def evaluates_alone(net: Any, model: Any, optimizer: Any) -> None:
    loss = loss_of(model, 0)
    with torch.no_grad():
        loss_of(model, 0) if dist.get_rank() else model.clip_grad_norm_(1.0)
    del loss


def uses_others(net: Any, model: Any, optimizer: Any) -> None:
    loss_of(model, 0, dist.get_rank() == 1)


def goes_another_way(net: Any, model: Any, optimizer: Any) -> None:
    loss = loss_of(model, 0)
    loss.backward() if dist.get_rank() == 1 else loss_of(model, 1)


def clips_alone(net: Any, model: Any, optimizer: Any) -> None:
    loss_of(model, 0).backward()
    model.clip_grad_norm_(1.0) if dist.get_rank() == 1 else optimizer.step()


def clips_to_other_norms(net: Any, model: Any, optimizer: Any) -> None:
    loss_of(model, 0).backward()
    model.clip_grad_norm_(1 + dist.get_rank())


def clips_badly(net: Any, model: Any, optimizer: Any) -> None:
    loss_of(model, 0).backward()
    model.clip_grad_norm_(0.5 - dist.get_rank())


def joins(net: Any, model: Any, optimizer: Any) -> None:
    with model.join():
        loss_of(model, 0)


def steps_ahead_of_a_forward(net: Any, model: Any, optimizer: Any) -> None:
    net.into.weight.grad = torch.ones_like(net.into.weight)
    optimizer.step()


def steps_alone(net: Any, model: Any, optimizer: Any) -> None:
    with model.no_sync():
        loss_of(model, 0).backward()
    optimizer.step()


HOWS: tuple[Callable[[Any, Any, Any], None], ...] = (
    writes_between,
    steps_between,
    reads_between,
    reads_too_late,
    fails_in_forward,
    fails_in_an_evaluation,
    evaluates_alone,
    uses_others,
    goes_another_way,
    clips_alone,
    clips_to_other_norms,
    clips_badly,
    joins,
    steps_ahead_of_a_forward,
    steps_alone,
)


def all_fail() -> dict[str, str]:
    found = {}
    for how in HOWS:
        net, model, optimizer = sharded("adamw")
        try:
            how(net, model, optimizer)
            found[how.__name__] = "went on"
        except Exception as error:
            found[how.__name__] = f"{type(error).__name__}: {error}"
        optimizer.zero_grad()
        loss_of(model, 1).backward()  # an error has no consequences
        optimizer.step()
    return found


def test_errors_are_those_of_all_ranks(ranks: Ranks) -> None:
    one, other = ranks.values(all_fail)
    for found in (one, other):
        written = "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace"
        assert found["writes_between"].startswith(written) and "back.weight" in found["writes_between"]
        assert found["steps_between"].startswith(written)
        assert found["reads_between"] == "went on"
        assert "has been replaced before anybody read it" in found["reads_too_late"]
        assert "PlanMismatchError: ranks 0 and 1 use different parameters" in found["uses_others"]
        assert "rank 0 has no use of spare.weight" in found["uses_others"]
        assert "which ranks have divided and gather together" in found["uses_others"]
        assert "called different methods of a step" in found["goes_another_way"]
        assert "rank 0: a forward" in found["goes_another_way"]
        assert (
            "rank 1: an evaluation" in found["evaluates_alone"]
            and "rank 0: clip_grad_norm_" in found["evaluates_alone"]
        )
        assert "called different methods of a step" in found["clips_to_other_norms"]
        assert "rank 1: clip_grad_norm_(2.0, norm_type=2.0)" in found["clips_to_other_norms"]
        assert "join() with enable_parallel_optimizer=True is not available yet" in found["joins"]
        assert "ahead of the first forward" in found["steps_ahead_of_a_forward"]
        assert "holds gradients of this rank alone" in found["steps_alone"]
    assert (
        "PeerFailedError" in one["clips_badly"] and "rank 1: ConfigValueError: max_norm is -0.5" in one["clips_badly"]
    )
    assert other["clips_badly"] == "ConfigValueError: max_norm is -0.5; give a number >= 0"
    for how in ("fails_in_forward", "fails_in_an_evaluation"):
        assert "PeerFailedError" in one[how] and "rank 1: RuntimeError" in one[how]
        assert other[how].startswith("RuntimeError")


def comes_alone() -> str:
    _, model, optimizer = sharded("adamw")
    loss_of(model, 0).backward()
    optimizer.step()
    hurry(6.0)
    try:
        if dist.get_rank() == 0:
            model.state_dict()
    except cf.CollectiveError as error:
        return str(error)
    return ""


def forwards_alone() -> str:
    _, model = divided()
    loss_of(model, 0)
    hurry(6.0)
    try:
        if dist.get_rank() == 0:
            loss_of(model, 0)
    except cf.CollectiveError as error:
        return str(error)
    return ""


def test_a_rank_that_comes_alone_does_not_wait_for_ever(ranks: Ranks) -> None:
    said, _ = ranks.values(comes_alone)
    assert "is done by all ranks together" in said
    said, _ = ranks.values(forwards_alone)
    assert "no vote has come from rank 1" in said


def is_killed_in_a_forward() -> str:
    _, model, optimizer = sharded("adamw")
    for step in range(2):
        optimizer.zero_grad()
        if step == 1 and dist.get_rank() == 1:
            messages.all_gather_single = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
        try:
            loss_of(model, step).backward()
        except cf.CollectiveError as error:
            return str(error)
        optimizer.step()
    return "went on"


def test_a_rank_that_dies_in_a_forward_leaves_nobody_waiting(ranks: Ranks) -> None:
    one, other = run_soon(ranks, is_killed_in_a_forward)
    assert other.died == -signal.SIGKILL
    assert "failed" in one.value


class Branches(WithSpare):
    """Its Python code looks at values where it does not train."""

    def forward(self, x: torch.Tensor, spares: bool = False) -> torch.Tensor:
        found = super().forward(x, spares)
        return found if self.training or found.norm() < 1e9 else found * 2


def evaluates_as_it_is() -> tuple[float, bool]:
    """How an evaluation that cannot be one graph differs from one of whole parameters, and whether it makes them so."""
    net, model = divided(net=Branches())
    loss_of(model, 0)
    model.eval()
    with torch.no_grad():
        one = loss_of(model, 1)
        is_whole = not model._session.runners.executors.shards.is_divided
        return float((one - loss_of(net, 1)).abs()), is_whole


def test_a_model_that_cannot_be_traced_without_gradients_is_evaluated_as_it_is(ranks: Ranks) -> None:
    assert ranks.values(evaluates_as_it_is) == [(0.0, True)] * 2
