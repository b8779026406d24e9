"""Whether steps keep their pace, and which ranks are slow."""

from __future__ import annotations

import pytest

from commfuse_fx.trials.pace import FEWEST, MOST, Pace, slow_ranks


@pytest.mark.parametrize(("step", "window"), [(1e-4, MOST), (0.01, 100), (0.05, 20), (1.0, FEWEST)])
def test_looks_are_some_seconds_apart(step: float, window: int) -> None:
    assert Pace(step).window == window


def looks(*seconds: float) -> list[str]:
    pace = Pace(1.0)
    return [pace.change(each) for each in seconds]


def test_one_look_alone_changes_nothing() -> None:
    assert not any(looks(1.0, 1.5, 1.0, 1.1, 0.9, 0.5, 1.0))


@pytest.mark.parametrize(("now", "said"), [(1.4, "1.40"), (0.6, "0.60")])
def test_a_lasting_change_is_told(now: float, said: str) -> None:
    *before, last = looks(1.0, 1.02, now, now)
    assert not any(before)
    assert last == f"steps take {said} of the time that they took when their plan was chosen"


def test_the_pace_of_an_earlier_run_is_what_the_first_look_is_compared_with() -> None:
    pace = Pace(1.0, usual=0.5)
    assert not pace.change(1.0) and pace.change(1.0).startswith("steps take 2.00 of the time") and pace.usual == 0.5


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((1.0, 2.0, 2.0, 2.0, 2.0, 2.0), [4, 5]),
        ((1.0, 2.0, 2.0, 1.0, 1.0, 1.0), []),
        ((1.0, 1.0, 1.0, 1.0, 2.0, 2.0), [5]),
    ],
)
def test_a_change_in_a_time_of_calm_is_told_afterwards_if_it_lasts(
    seconds: tuple[float, ...], expected: list[int]
) -> None:
    pace = Pace(1.0, calm=5.0 * FEWEST)
    told = [bool(pace.change(each)) for each in seconds]
    assert [number for number, each in enumerate(told) if each] == expected


def test_slow_ranks() -> None:
    assert slow_ranks([1.0, 1.1, 0.9, 2.0]) == [3]
    assert slow_ranks([1.0, 2.0]) == [1] and slow_ranks([2.0, 1.0]) == [0]
    assert slow_ranks([1.0, 1.2]) == [] and slow_ranks([3.0, 3.0, 3.0]) == []
