"""Which plan has the next turn, and which one stays."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from commfuse_fx.trials.trial_order import FEWEST, MOST, Trials


def run(seconds: Callable[[int, int], float], plans: int = 3) -> Trials:
    """seconds: what a plan takes in a round."""
    trials = Trials([str(plan) for plan in range(plans)])
    turns = 0
    while not trials.is_over:
        trials.add(seconds(trials.next, len(trials.rounds)))
        turns += 1
        assert turns <= MOST * plans
    return trials


def test_turns_go_there_and_back() -> None:
    trials = Trials(["default", "one", "two"])
    turns = []
    for _ in range(6):
        turns.append(trials.next)
        trials.add(1.0)
    assert turns == [0, 1, 2, 2, 1, 0]


def test_a_plan_that_is_clearly_faster_stays() -> None:
    trials = run(lambda plan, _: [1.0, 0.9, 0.97][plan])
    assert trials.next == trials.winner == 1
    assert len(trials.rounds) == FEWEST
    assert trials.seconds(1) == 0.9


def test_the_default_stays_where_nothing_is_clearly_faster() -> None:
    assert run(lambda plan, _: [1.0, 0.995, 1.2][plan]).winner == 0
    noise = random.Random(0)
    wrong = sum(run(lambda plan, _: noise.uniform(0.85, 1.15)).winner != 0 for _ in range(300))
    assert wrong < 30


def test_a_faster_plan_is_found_in_noise() -> None:
    noise = random.Random(0)
    right = sum(run(lambda plan, _: [1.0, 0.9, 1.0][plan] * noise.uniform(0.97, 1.03)).winner == 1 for _ in range(300))
    assert right > 290


def test_a_default_that_stays_in_noise_alone_is_not_conclusive() -> None:
    """Another plan takes 0.9 of its time in the median, and now and then more."""
    trials = run(lambda plan, number: [1.0, 0.9 if number % 4 else 1.4][plan], plans=2)
    assert (trials.winner, trials.seconds(1)) == (0, 0.9) and not trials.is_conclusive
    equal = run(lambda plan, number: [1.0, 1.0 if number % 4 else 1.4][plan], plans=2)
    assert equal.winner == 0 and equal.is_conclusive


def test_a_machine_that_gets_slower_does_not_decide() -> None:
    clock = [0.0]

    def seconds(plan: int, number: int) -> float:
        clock[0] += 0.02
        return (1 + clock[0]) * [1.0, 0.95, 1.0][plan]

    assert run(seconds).winner == 1
    clock[0] = 0.0
    assert run(lambda plan, number: seconds(0, number)).winner == 0


def test_a_hopeless_plan_has_two_turns() -> None:
    trials = run(lambda plan, _: [1.0, 3.0, 0.98][plan])
    assert [1 in each for each in trials.rounds] == [True, True, *[False] * (len(trials.rounds) - 2)]
    assert trials.winner == 2 and trials.is_conclusive


def test_a_default_that_is_beaten_by_far_has_two_turns_too() -> None:
    trials = run(lambda plan, _: [1.0, 0.7, 0.9][plan])  # 0.9 is hopeless beside 0.7
    assert (trials.winner, len(trials.rounds)) == (1, 2) and trials.is_conclusive
    close = run(lambda plan, number: [1.0, 0.7, 0.69][plan])
    assert close.winner in (1, 2) and [0 in each for each in close.rounds][:3] == [True, True, False]
    noisy = run(lambda plan, number: [1.0, 0.7 if number == 1 else 1.0, 1.0][plan])
    assert noisy.winner == 0 and all(0 in each for each in noisy.rounds)


def test_what_takes_the_place_of_the_default_may_be_beaten_itself() -> None:
    assert run(lambda plan, number: [1.0, 0.7, 0.71 if number < 3 else 0.6][plan]).winner == 2


def test_alone_there_is_nothing_to_try() -> None:
    assert Trials(["default"]).is_over and Trials(["default"]).next == 0
    assert run(lambda plan, _: [1.0, 2.0][plan], plans=2).winner == 0


@pytest.mark.parametrize("turns", [0, 1, 3, 5])
def test_trials_may_end_before_their_time(turns: int) -> None:
    """With too few rounds nothing is clear, so the default stays."""
    trials = Trials(["default", "one"])
    for _ in range(turns):
        trials.add([1.0, 0.9][trials.next])
    trials.stop()
    assert trials.is_over and trials.next == 0 and not trials.is_conclusive
