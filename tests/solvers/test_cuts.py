from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.solvers.buckets.cuts import Forced, optimal_cuts
from tests.cost.plans import alphas, close, contiguous, ordered_partitions, small


def send_all(
    buckets: Sequence[Sequence[int]],
    ready: Sequence[float],
    sizes: Sequence[float],
    alpha: float,
    beta: float,
    busy_until: float = 0.0,
) -> float:
    free = busy_until
    for bucket in buckets:
        free = max(free, max(ready[m] for m in bucket)) + alpha + beta * sum(sizes[m] for m in bucket)
    return free


def textbook(ready: Sequence[float], sizes: Sequence[float], alpha: float, beta: float, busy_until: float) -> float:
    finish = [busy_until]
    for end in range(1, len(ready) + 1):
        finish.append(
            min(max(finish[begin], ready[end - 1]) + alpha + beta * sum(sizes[begin:end]) for begin in range(end))
        )
    return finish[-1]


@st.composite
def sequences(draw: st.DrawFn, most: int) -> tuple[list[float], list[float]]:
    members = draw(st.lists(st.tuples(small, small), max_size=most))
    return sorted(ready for ready, _ in members), [size for _, size in members]


@settings(max_examples=40, deadline=None)
@given(sequences(5), alphas, st.sampled_from([0.0, 1.0, 2.0]), small)
def test_cuts_match_every_partition_in_every_order(
    given_members: tuple[list[float], list[float]], alpha: float, beta: float, busy: float
) -> None:
    ready, sizes = given_members
    cuts = optimal_cuts(ready, sizes, alpha, beta, busy_until=busy)
    found = [(send_all(p, ready, sizes, alpha, beta, busy), len(p)) for p in ordered_partitions(range(len(ready)))]
    assert (cuts.finish, len(cuts.buckets)) == min(found)


def test_cuts_match_every_partition_of_six_in_every_order() -> None:
    rng = random.Random(3)
    for _ in range(12):
        ready, sizes = sorted(rng.random() for _ in range(6)), [rng.random() for _ in range(6)]
        alpha = rng.choice([0.05, 0.2, 0.5])
        cuts = optimal_cuts(ready, sizes, alpha, 0.3)
        assert cuts.finish == pytest.approx(
            min(send_all(p, ready, sizes, alpha, 0.3) for p in ordered_partitions(range(6))), rel=1e-9
        )


@settings(max_examples=150, deadline=None)
@given(sequences(7), alphas, st.sampled_from([0.0, 1.0]), small, st.none() | small, st.data())
def test_cuts_under_limits_match_every_legal_cut(
    given_members: tuple[list[float], list[float]],
    alpha: float,
    beta: float,
    busy: float,
    max_bytes: float | None,
    data: st.DataObject,
) -> None:
    ready, sizes = given_members
    count = len(ready)
    edges = sorted(data.draw(st.sets(st.integers(0, count), max_size=4)))
    forced = [Forced(b, e, data.draw(st.booleans())) for b, e in pairwise(edges) if data.draw(st.booleans())]
    whole = [(one.begin, one.end) for one in forced]
    alone = [(one.begin, one.end) for one in forced if one.alone]

    def legal(buckets: list[tuple[int, int]]) -> bool:
        if any(b < edge < e for b, e in whole for _, edge in buckets):
            return False
        if any(bucket not in buckets for bucket in alone):
            return False
        single = [*whole, *((i, i + 1) for i in range(count))]
        return max_bytes is None or all(sum(sizes[b:e]) <= max_bytes or (b, e) in single for b, e in buckets)

    cuts = optimal_cuts(ready, sizes, alpha, beta, busy_until=busy, max_bytes=max_bytes, forced=forced)
    assert cuts == optimal_cuts(ready, sizes, alpha, beta, busy_until=busy, max_bytes=max_bytes, forced=forced[::-1])
    assert legal(list(cuts.buckets))
    every = [b for b in contiguous(count) if legal(b)] if count else [[]]
    found = [(send_all([range(*b) for b in p], ready, sizes, alpha, beta, busy), len(p)) for p in every]
    assert (cuts.finish, len(cuts.buckets)) == min(found)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1) | st.just(0.0)), max_size=60),
    st.sampled_from([0.0, 1e-3, 0.05, 1.0, 1e6]),
    st.sampled_from([0.0, 1e-2, 0.1, 1.0]),
    st.sampled_from([0.0, 0.5, 3.0]),
)
def test_linear_time_matches_the_textbook_recurrence(
    members: list[tuple[float, float]], alpha: float, beta: float, busy: float
) -> None:
    ready = sorted(r for r, _ in members)
    sizes = [size for _, size in members]
    cuts = optimal_cuts(ready, sizes, alpha, beta, busy_until=busy)
    assert cuts.finish == pytest.approx(textbook(ready, sizes, alpha, beta, busy), rel=1e-8)
    assert [i for b, e in cuts.buckets for i in range(b, e)] == list(range(len(ready)))
    replayed = send_all([range(*bucket) for bucket in cuts.buckets], ready, sizes, alpha, beta, busy)
    assert cuts.finish == pytest.approx(replayed, rel=1e-8)


@settings(deadline=None)
@given(
    sequences(9),
    st.lists(st.tuples(st.sampled_from([0.0, 1.0, 3.0, 20.0]), st.sampled_from([0.0, 0.5, 1.0, 2.0])), min_size=2),
    small,
    st.none() | st.integers(0, 40).map(float),
)
def test_cuts_under_several_prices_match_every_cut(
    members: tuple[list[float], list[float]],
    lines: list[tuple[float, float]],
    busy: float,
    most: float | None,
) -> None:
    ready, sizes = members

    def finish(cut: Sequence[tuple[int, int]]) -> float:
        free = busy
        for begin, end in cut:
            nbytes = sum(sizes[begin:end])
            free = max(free, ready[end - 1]) + min(alpha + beta * nbytes for alpha, beta in lines)
        return free

    legal = [
        cut
        for cut in contiguous(len(ready))
        if most is None or all(end - begin == 1 or sum(sizes[begin:end]) <= most for begin, end in cut)
    ]
    found = optimal_cuts(ready, sizes, *lines[0], busy_until=busy, max_bytes=most, also=lines[1:])
    if not ready:
        assert found.buckets == ()
        return
    assert list(found.buckets) in legal
    assert found.finish == pytest.approx(finish(found.buckets))
    assert found.finish <= close(min(finish(cut) for cut in legal))


def test_cuts_by_hand_with_two_algorithms() -> None:
    ready, sizes = [0.0, 10.0, 20.0], [10.0, 10.0, 1.0]
    # A ring of 8 s and 0.5 s per byte, a tree of 1 s and 2 s per byte: the last byte goes by tree, the rest by ring.
    found = optimal_cuts(ready, sizes, 8.0, 0.5, also=[(1.0, 2.0)])
    assert found.buckets == ((0, 1), (1, 2), (2, 3))
    assert found.finish == 13.0 + 13.0 + 3.0
    # With equal lines, or ones that never win, it is what one line gives.
    assert optimal_cuts(ready, sizes, 8.0, 0.5, also=[(8.0, 0.5)]) == optimal_cuts(ready, sizes, 8.0, 0.5)
    assert optimal_cuts(ready, sizes, 8.0, 0.5, also=[(9.0, 3.0)]).finish == optimal_cuts(ready, sizes, 8.0, 0.5).finish


def test_cuts_by_hand() -> None:
    # Sent one by one: 0+1+4=5, 10, 15; the last two together: 2 after the first one ends at 5, 5+1+8=14.
    cuts = optimal_cuts([0.0, 1.0, 2.0], [4, 4, 4], alpha=1.0, beta=1.0)
    assert (cuts.finish, cuts.buckets) == (14.0, ((0, 1), (1, 3)))
    # One late member decides alone: everything before it fits into one bucket.
    cuts = optimal_cuts([0.0, 1.0, 2.0, 100.0], [4, 4, 4, 4], alpha=1.0, beta=1.0)
    assert (cuts.finish, cuts.buckets) == (105.0, ((0, 3), (3, 4)))
    assert optimal_cuts([], [], 1.0, 1.0, busy_until=7.0).finish == 7.0


def test_further_prices_are_checked() -> None:
    with pytest.raises(ConfigValueError, match=r"also\[1\]\[0\]"):
        optimal_cuts([0.0], [1.0], 1.0, 1.0, also=[(1.0, 1.0), (-1.0, 1.0)])


def test_cuts_refuse_what_they_cannot_mean() -> None:
    with pytest.raises(ConfigValueError, match=r"ready\[1\] is 1.0"):
        optimal_cuts([2.0, 1.0], [1, 1], 0.0, 1.0)
    with pytest.raises(ConfigValueError, match="ready has 1 entries and sizes 2"):
        optimal_cuts([2.0], [1, 1], 0.0, 1.0)
    with pytest.raises(ConfigValueError, match="alpha is -1.0"):
        optimal_cuts([2.0], [1], -1.0, 1.0)
    with pytest.raises(ConfigValueError, match="beta is nan"):
        optimal_cuts([2.0], [1], 0.0, float("nan"))
    with pytest.raises(ConfigTypeError, match="max_bytes is '1MB'"):
        optimal_cuts([2.0], [1], 0.0, 1.0, max_bytes="1MB")  # type: ignore[arg-type]
    with pytest.raises(ConfigValueError, match="overlaps"):
        optimal_cuts([0.0, 0.0, 0.0], [1, 1, 1], 0.0, 1.0, forced=[Forced(0, 2), Forced(1, 3)])
    with pytest.raises(ConfigValueError, match="not within the 1 members"):
        optimal_cuts([0.0], [1], 0.0, 1.0, forced=[Forced(0, 2)])
