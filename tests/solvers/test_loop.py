"""Plans across steps on the engine: one round of the loop, and what bursts leave for the next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commfuse_fx.cost.transfer import Transfer
from commfuse_fx.solvers.buckets import loop
from commfuse_fx.solvers.buckets.cyclic import CyclicMember, cyclic_plans
from commfuse_fx.solvers.buckets.loop import Loop
from commfuse_fx.solvers.buckets.piece_choices import PieceChoice, merged_member, piece_choices

MEMBERS = [CyclicMember(100, 0, 1), CyclicMember(100, 1, 0)]


def _loop(burst: float = 0.0, boost: float = 1.0, each: float = 0.02) -> Loop:
    """Two blocks of a second each, forward and backward; `each` seconds on the wire per byte."""
    price = {n: Transfer("dp", 0.0, each * n, links=("l",), burst=burst, boost=boost) for n in (50, 100, 200)}
    return Loop([1.0, 1.0], [1.0, 1.0], price.__getitem__)


def _plan(given: Loop) -> float:
    (plan, *_) = cyclic_plans(given.forward, given.backward, MEMBERS, 0.0, 0.02, None)
    return given.period(MEMBERS, plan)


def test_a_round_without_bursts() -> None:
    # In order of readiness: sent from 1 to 3 and from 3 to 5; the first block of the forward waits for the second one.
    assert _plan(_loop()) == pytest.approx(7.0)
    # As fast as the blocks, where the wire is no hindrance.
    assert _plan(_loop(each=1e-6)) == pytest.approx(4.0, rel=1e-3)


def test_a_burst_lasts_only_as_long_as_it_is_earned(monkeypatch: pytest.MonkeyPatch) -> None:
    # 8 s of transfers in each round: the first one carries all of it in its burst, the later ones earn half of it.
    steady = _plan(_loop(burst=8.0, boost=100.0, each=0.04))
    assert steady == pytest.approx(8.0, rel=1e-2)
    monkeypatch.setattr(loop, "MOST_ROUNDS", 1)
    assert _plan(_loop(burst=8.0, boost=100.0, each=0.04)) == pytest.approx(4.04, rel=1e-2)


@pytest.mark.parametrize("each", [0.005, 0.01, 0.02, 0.04])
@pytest.mark.parametrize("burst", [0.5, 2.0, 8.0])
def test_no_loop_is_faster_than_its_bytes_at_the_rate(each: float, burst: float) -> None:
    assert _plan(_loop(burst, 50.0, each)) >= max(4.0, 200 * each) * (1 - 2e-3)


def test_the_best_has_the_fewest_messages_among_equals() -> None:
    free = _loop(each=0.0)
    choices = piece_choices(free.forward, free.backward, MEMBERS, 0.0, 0.0, pieces=(50,), merges=(200,))
    choice, period = free.best(list(choices))
    assert len(choice.plan.order) == 1
    assert period == pytest.approx(4.0)


def test_late_results_are_waited_for_once_a_step() -> None:
    free = _loop(each=0.0)
    (plan, *_) = cyclic_plans(free.forward, free.backward, MEMBERS, 0.0, 0.0, None)
    late = replace(free, late=0.5)
    # The first block of the forward needs what is sent at the end of the backward; the second one has had its result.
    assert late.period(MEMBERS, plan) == pytest.approx(4.5)


def test_of_plans_as_fast_the_one_that_bears_late_results_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    free = _loop(each=0.0)
    members = [CyclicMember(100, 0, 0), CyclicMember(100, 1, 1)]  # a block of compute between ready and needed
    together = [merged_member(members)]  # ready last and needed first
    choices = [
        (PieceChoice(None, groups, cyclic_plans(free.forward, free.backward, given, 0.0, 0.0, None)[0]), given)
        for groups, given in ((((0, 1),), together), (((0,), (1,)), members))
    ]
    choice, period = free.best(choices)
    assert (len(choice.plan.order), period) == (2, pytest.approx(4.0))
    monkeypatch.setattr(loop, "LATE", 0.0)
    assert len(free.best(choices)[0].plan.order) == 1
