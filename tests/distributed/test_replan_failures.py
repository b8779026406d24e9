"""A rank fails, is interrupted or is killed while plans are measured, made and tried: no other one is left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import commfuse_fx as cf
from commfuse_fx.measure.contention_probe import _Compute as Contender
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.trials import measured_plans
from tests.distributed.harness import Ranks, run_soon
from tests.distributed.models_of_ranks import xy
from tests.distributed.quick_trials import quickly
from tests.distributed.step_twins import Twins

pytestmark = pytest.mark.dist


def is_due(twins: Twins, tries: bool) -> bool:
    """Whether the ranks meet before the next step: because plans are tried, or to make them."""
    found = twins.step.session.replan
    assert found is not None
    return not found.is_settled and found.clock.is_due and (found._turns is not None) == tries


def all_go_on(fail: Callable[[Twins], None]) -> bool:
    """Train until a plan stays, and call this between steps. Whether a plan stays; training is the same all the way."""
    with quickly():
        twins = Twins()
        twins.settle(fail)
        twins.check()
    return twins.is_settled


def one_rank_fails(tries: bool, how: str) -> tuple[list[str], bool]:
    """Rank 1 fails in a step before which the ranks meet. Then all go on."""
    errors: list[str] = []

    def fail(twins: Twins) -> None:
        if errors or not is_due(twins, tries):
            return
        x, y = xy(twins.number)
        step: Any = twins.step
        if dist.get_rank() == 1:
            x = {"no batch": object(), "wrong size": x[:, :3]}.get(how, x)
            step = twins.plain if how == "other step" else step
        elif how == "Ctrl-C":
            return  # the other rank calls the same step once more
        interrupt = patch.object(Executor, "gather", side_effect=KeyboardInterrupt)
        with interrupt if how == "Ctrl-C" else nullcontext():
            try:
                step(x, y)
            except (cf.CommFuseError, RuntimeError, KeyboardInterrupt) as error:
                errors.append(type(error).__name__)

    return errors, all_go_on(fail)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("no batch", [["PeerFailedError"], ["ConfigTypeError"]]),
        ("wrong size", [["PeerFailedError"], ["RuntimeError"]]),
        ("Ctrl-C", [[], ["KeyboardInterrupt"]]),
        ("other step", [["PlanMismatchError"], ["PlanMismatchError"]]),
    ],
)
@pytest.mark.parametrize("tries", [True, False])
def test_a_rank_that_fails_where_ranks_meet(ranks: Ranks, tries: bool, how: str, expected: list[list[str]]) -> None:
    found = run_soon(ranks, one_rank_fails, tries, how)
    assert [each.value for each in found] == [(errors, True) for errors in expected], [each.details for each in found]


def leaves_while_the_network_is_measured(how: str) -> list[str]:
    """Rank 1 fails or is killed between two probes of the network."""
    errors = []

    def leave(compute: Contender) -> None:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise {"no memory": MemoryError, "Ctrl-C": KeyboardInterrupt}[how]

    with quickly(), patch.object(Contender, "once", leave) if dist.get_rank() else nullcontext():
        twins = Twins()
        for _ in range(2):
            try:
                twins.settle()
            except (cf.CommFuseError, MemoryError, KeyboardInterrupt) as error:
                errors.append(f"{type(error).__name__}: {error}")
    return errors


@pytest.mark.parametrize(
    ("how", "own"), [("no memory", "MemoryError"), ("Ctrl-C", "KeyboardInterrupt"), ("killed", "")]
)
def test_a_rank_that_leaves_while_the_network_is_measured(ranks: Ranks, how: str, own: str) -> None:
    one, other = run_soon(ranks, leaves_while_the_network_is_measured, how)
    assert one.ok, one.details
    assert one.value[0].startswith("CollectiveError: rank 0: measuring the network failed"), one.value
    assert "start all ranks again" in one.value[1]
    if how == "killed":
        assert other.died == -signal.SIGKILL
    else:
        assert own in one.value[0] and other.value[0].startswith(own)


def is_interrupted_while_plans_are_made() -> tuple[list[str], bool]:
    """Ctrl-C comes to rank 1 while it makes plans of what was measured. Then all go on."""
    errors: list[str] = []
    candidates = measured_plans.candidates

    def interrupted(*args: Any) -> Any:
        if not errors and dist.get_rank() == 1:
            raise KeyboardInterrupt
        return candidates(*args)

    with quickly(), patch.object(measured_plans, "candidates", interrupted):
        twins = Twins()
        while not twins.is_settled:
            try:
                twins.step(*(batch := xy(twins.number, rows=4)))
            except (cf.CommFuseError, KeyboardInterrupt) as error:
                errors.append(type(error).__name__)
                continue
            twins.plain(*batch)
            twins.number += 1
        twins.check()
    return errors, twins.is_settled


def test_ctrl_c_on_one_rank_while_plans_are_made(ranks: Ranks) -> None:
    found = run_soon(ranks, is_interrupted_while_plans_are_made)
    assert [each.value for each in found] == [(["PeerFailedError"], True), (["KeyboardInterrupt"], True)], found


def has_a_bad_target_while_nodes_are_measured() -> tuple[list[str], bool]:
    """Rank 1 fails in the forward of a step that is measured. Then all go on."""
    errors: list[str] = []

    def fail(twins: Twins) -> None:
        replan = twins.step.session.replan
        assert replan is not None
        if errors or not replan._is_measuring:
            return
        x, y = xy(twins.number)
        try:
            twins.step(x, y + 7 * dist.get_rank())
        except (cf.CommFuseError, IndexError) as error:
            errors.append(type(error).__name__)

    return errors, all_go_on(fail)


def test_a_rank_that_fails_while_nodes_are_measured(ranks: Ranks) -> None:
    found = run_soon(ranks, has_a_bad_target_while_nodes_are_measured)
    assert [each.value for each in found] == [(["PeerFailedError"], True), (["IndexError"], True)], found


def is_killed_where_ranks_meet(tries: bool) -> str:
    def leave(twins: Twins) -> None:
        if is_due(twins, tries) and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with quickly():
        try:
            Twins().settle(leave)
        except cf.CollectiveError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("tries", [True, False])
def test_a_rank_that_is_killed_where_ranks_meet(ranks: Ranks, tries: bool) -> None:
    one, other = run_soon(ranks, is_killed_where_ranks_meet, tries)
    assert other.died is not None and one.value.startswith("rank 0: the agreement before the first collective")
