from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_fx.cost.consumers import Item, optimal_plan, simulate_plan, starting_plans
from commfuse_fx.cost.cuts import Forced, optimal_cuts
from commfuse_fx.cost.cyclic import CyclicMember, CyclicPlan, choose_piece, cyclic_plan, period_bound
from commfuse_fx.errors import ConfigTypeError, ConfigValueError

# Small whole numbers: sums of them are exact, and ties and zeros are frequent.
small = st.integers(0, 12).map(float)
alphas = st.sampled_from([0.0, 1.0, 3.0, 1000.0])


def close(value: float) -> float:
    """The most that still counts as this value."""
    return value * (1 + 1e-8)


def contiguous(count: int) -> Iterator[list[tuple[int, int]]]:
    """All cuts of a sequence."""
    for mask in range(1 << max(count - 1, 0)):
        edges = [0, *(i + 1 for i in range(count - 1) if mask >> i & 1), count]
        yield list(pairwise(edges))


def ordered_partitions(members: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """All partitions of the members, in all orders."""
    if not members:
        yield []
        return
    for mask in range(1, 1 << len(members)):
        first = tuple(m for i, m in enumerate(members) if mask >> i & 1)
        for rest in ordered_partitions([m for i, m in enumerate(members) if not mask >> i & 1]):
            yield [first, *rest]


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


# Consumers in the same step


@st.composite
def programs(draw: st.DrawFn, most: int) -> tuple[list[Item], list[float]]:
    """Each member's "ready" somewhere, its "need" somewhere after it, "run" in between."""
    count = draw(st.integers(0, most))
    marks: list[Item] = []
    for member in range(count):
        at = draw(st.integers(0, len(marks)))
        marks.insert(at, ("ready", member))
        marks.insert(draw(st.integers(at + 1, len(marks))), ("need", member))
    items: list[Item] = [("run", draw(small))]
    for mark in marks:
        items.append(mark)
        if draw(st.booleans()):
            items.append(("run", draw(small)))
    return items, draw(st.lists(small, min_size=count, max_size=count))


def random_program(rng: random.Random, count: int) -> tuple[list[Item], list[float]]:
    items: list[Item] = []
    for member in range(count):
        items += [("run", rng.random()), ("ready", member)]
    for member in sorted(range(count), key=lambda m: rng.random() * count - rng.choice([0, 1]) * m):
        items += [("need", member), ("run", rng.random() / 2)]
    return items, [rng.random() for _ in range(count)]


def every_plan(items: list[Item], sizes: list[float], alpha: float, beta: float) -> list[tuple[float, int]]:
    found = []
    for partition in ordered_partitions(range(len(sizes))):
        try:
            found.append((simulate_plan(items, sizes, alpha, beta, partition), len(partition)))
        except ConfigValueError:
            continue
    return found


@settings(max_examples=60, deadline=None)
@given(programs(4), alphas, st.sampled_from([0.0, 1.0]))
def test_exact_plan_matches_every_legal_plan(
    program: tuple[list[Item], list[float]], alpha: float, beta: float
) -> None:
    items, sizes = program
    plan = optimal_plan(items, sizes, alpha, beta)
    assert plan.finish == simulate_plan(items, sizes, alpha, beta, plan.buckets)
    assert (plan.finish, len(plan.buckets)) == min(every_plan(items, sizes, alpha, beta))


def test_exact_plan_of_five_matches_every_legal_plan() -> None:
    rng = random.Random(11)
    for _ in range(25):
        items, sizes = random_program(rng, 5)
        alpha = rng.choice([0.01, 0.2, 1.0])
        plan = optimal_plan(items, sizes, alpha, 0.5)
        assert plan.finish == pytest.approx(min(every_plan(items, sizes, alpha, 0.5))[0], rel=1e-12)
        assert plan.finish == pytest.approx(simulate_plan(items, sizes, alpha, 0.5, plan.buckets), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(programs(14), alphas, st.sampled_from([0.0, 1.0]))
def test_search_never_worse_than_where_it_starts(
    program: tuple[list[Item], list[float]], alpha: float, beta: float
) -> None:
    items, sizes = program
    plan = optimal_plan(items, sizes, alpha, beta, exact_limit=0)
    assert plan == optimal_plan(items, sizes, alpha, beta, exact_limit=0)
    assert plan.finish == simulate_plan(items, sizes, alpha, beta, plan.buckets)
    starts = starting_plans(items, sizes, alpha, beta)
    assert all(start.finish == simulate_plan(items, sizes, alpha, beta, start.buckets) for start in starts)
    assert plan.finish <= min(start.finish for start in starts)
    by_ready = [int(member) for kind, member in items if kind == "ready"]
    assert plan.finish <= simulate_plan(items, sizes, alpha, beta, [[member] for member in by_ready])
    try:
        assert plan.finish <= simulate_plan(items, sizes, alpha, beta, [by_ready] if by_ready else [])
    except ConfigValueError:
        assert len(plan.buckets) > 1  # one bucket is not legal


def test_search_comes_close_to_the_exact_plan() -> None:
    rng = random.Random(2)
    for _ in range(10):
        items, sizes = random_program(rng, 8)
        exact = optimal_plan(items, sizes, 0.1, 0.5)
        searched = optimal_plan(items, sizes, 0.1, 0.5, exact_limit=0)
        assert exact.finish <= searched.finish <= 1.1 * exact.finish


def test_search_of_many_members_ends_and_improves() -> None:
    rng = random.Random(4)
    items: list[Item] = [item for m in range(600) for item in (("run", rng.random()), ("ready", m))]
    items += [item for m in reversed(range(600)) for item in (("need", m), ("run", rng.random()))]
    sizes = [rng.random() for _ in range(600)]
    plan = optimal_plan(items, sizes, 0.5, 0.5)
    assert sorted(m for bucket in plan.buckets for m in bucket) == list(range(600))
    assert plan.finish == pytest.approx(simulate_plan(items, sizes, 0.5, 0.5, plan.buckets), rel=1e-9)
    assert plan.finish < min(start.finish for start in starting_plans(items, sizes, 0.5, 0.5))


def test_plan_by_hand() -> None:
    # Member 1 is ready last and needed first: alone and at once. Merged, 0 and 2 save an alpha that nobody waits for.
    items: list[Item] = [
        ("ready", 0), ("run", 1.0), ("ready", 2), ("ready", 1), ("need", 1), ("run", 9.0), ("need", 0), ("need", 2),
    ]  # fmt: skip
    plan = optimal_plan(items, [4.0, 1.0, 4.0], alpha=1.0, beta=1.0)
    assert (plan.finish, plan.buckets) == (12.0, ((1,), (0, 2)))
    assert simulate_plan(items, [4.0, 1.0, 4.0], 1.0, 1.0, [[0], [1], [2]]) == 16.0


def test_plans_refuse_what_they_cannot_mean() -> None:
    items: list[Item] = [("ready", 0), ("need", 0), ("ready", 1), ("need", 1)]
    with pytest.raises(ConfigValueError, match="member 0 is needed before bucket 0 can be issued"):
        simulate_plan(items, [1, 1], 0.0, 1.0, [[0, 1]])
    with pytest.raises(ConfigValueError, match="member 0 is needed before bucket 1 can be issued"):
        simulate_plan(items, [1, 1], 0.0, 1.0, [[1], [0]])
    for wrong in ([[0]], [[0], [1], [1]], [[0], [], [1]]):
        with pytest.raises(ConfigValueError, match="each of the 2 members once"):
            simulate_plan(items, [1, 1], 0.0, 1.0, wrong)
    with pytest.raises(ConfigValueError, match="member 1 is never needed"):
        optimal_plan(items[:3], [1, 1], 0.0, 1.0)
    with pytest.raises(ConfigValueError, match="needed before it is ready"):
        optimal_plan(items[1:], [1, 1], 0.0, 1.0)
    with pytest.raises(ConfigValueError, match="ready twice"):
        optimal_plan([items[0], *items], [1, 1], 0.0, 1.0)
    with pytest.raises(ConfigValueError, match="of kind 'wait'"):
        optimal_plan([("wait", 0)], [1], 0.0, 1.0)
    with pytest.raises(ConfigValueError, match="names member 5"):
        optimal_plan([("ready", 5)], [1], 0.0, 1.0)
    with pytest.raises(ConfigValueError, match="exact_limit is 40"):
        optimal_plan(items, [1, 1], 0.0, 1.0, exact_limit=40)


# Consumers in the next step


@st.composite
def loops(draw: st.DrawFn) -> tuple[list[float], list[float], list[CyclicMember]]:
    forward = draw(st.lists(small, min_size=1, max_size=6))
    backward = draw(st.lists(small, min_size=1, max_size=6))
    member = st.builds(
        CyclicMember,
        st.integers(0, 40),
        st.integers(0, len(backward) - 1),
        st.integers(0, len(forward) - 1),
        st.integers(0, 3).map(float),
    )
    return forward, backward, draw(st.lists(member, max_size=8))


def run_rounds(
    plan: CyclicPlan,
    forward: Sequence[float],
    backward: Sequence[float],
    members: Sequence[CyclicMember],
    alpha: float,
    beta: float,
    rounds: int = 4,
) -> list[float]:
    """When the backward of each round begins, with no host contention; one stream over all rounds."""
    now = free = 0.0
    arrival = [0.0] * len(members)
    begins = []
    for _ in range(rounds):
        begins.append(now)
        following = 0
        for block, seconds in enumerate(backward):
            now += seconds
            while following < len(plan.order) and plan.issue_after[following] <= block:
                member, begin, end = plan.order[following]
                free = max(free, now) + alpha + beta * (end - begin)
                arrival[member] = free
                following += 1
        assert following == len(plan.order)
        for block, seconds in enumerate(forward):
            for member, anchor in plan.update_order:
                if anchor == block:
                    now = max(now, arrival[member]) + members[member].update
            now += seconds
    return begins


def plain_period(
    forward: Sequence[float], backward: Sequence[float], members: Sequence[CyclicMember], alpha: float, beta: float
) -> float:
    """Whole members in order of readiness; all updates, in that order, before the forward."""
    order = sorted(range(len(members)), key=lambda m: members[m].ready)
    plan = CyclicPlan(
        tuple((m, 0, members[m].nbytes) for m in order),
        tuple(members[m].ready for m in order),
        tuple((m, 0) for m in order),
        0.0,
    )
    begins = run_rounds(plan, forward, backward, members, alpha, beta, rounds=2)
    return begins[1] - begins[0]


def check_complete(plan: CyclicPlan, members: Sequence[CyclicMember]) -> None:
    for index, member in enumerate(members):
        parts = [(begin, end) for m, begin, end in plan.order if m == index]
        assert parts[0][0] == 0 and parts[-1][1] == member.nbytes
        assert all(one[1] == other[0] for one, other in pairwise(parts))
    reached = 0
    for (index, _, _), after in zip(plan.order, plan.issue_after, strict=True):
        reached = max(reached, members[index].ready)
        assert after == reached
    assert sorted(member for member, _ in plan.update_order) == list(range(len(members)))
    anchors = [anchor for _, anchor in plan.update_order]
    assert anchors == sorted(anchors)
    assert all(anchor <= members[member].need for member, anchor in plan.update_order)


@settings(max_examples=200, deadline=None)
@given(loops(), alphas, st.sampled_from([0.0, 0.25, 1.0]), st.none() | st.integers(1, 20))
def test_cyclic_plan_keeps_its_period_and_beats_the_plain_order(
    loop: tuple[list[float], list[float], list[CyclicMember]], alpha: float, beta: float, piece: int | None
) -> None:
    forward, backward, members = loop
    plan = cyclic_plan(forward, backward, members, alpha, beta, piece)
    assert plan == cyclic_plan(forward, backward, members, alpha, beta, piece)
    check_complete(plan, members)
    begins = run_rounds(plan, forward, backward, members, alpha, beta)
    assert all(after - before == pytest.approx(plan.period) for before, after in pairwise(begins))
    assert close(plan.period) >= period_bound(forward, backward, members, alpha, beta)
    assert plan.period <= close(plain_period(forward, backward, members, alpha, beta))


@settings(max_examples=150, deadline=None)
@given(loops(), alphas, st.integers(1, 20), st.sampled_from([0.1, 0.5, 2.0]))
def test_cyclic_plan_with_a_busy_host(
    loop: tuple[list[float], list[float], list[CyclicMember]], alpha: float, piece: int, host: float
) -> None:
    forward, backward, members = loop
    plan = cyclic_plan(forward, backward, members, alpha, 0.5, piece, host)
    check_complete(plan, members)
    assert close(plan.period) >= period_bound(forward, backward, members, alpha, 0.5, host)
    moved = host * sum(member.nbytes for member in members)
    whole = sum(forward) + sum(backward) + sum(member.update for member in members)
    sent = sum(max(alpha + 0.5 * member.nbytes, host * member.nbytes) for member in members)
    assert plan.period <= close(whole + moved + sent)


def test_cyclic_plan_by_hand() -> None:
    # The large member is ready first and needed last. At 1 its first piece goes, at 5 its second (4 bytes each); at
    # 6 the small member, needed first, gets the stream at 9 and arrives at 11: the rest of the large one follows and
    # arrives at 19. Forward: 11..21 the first block, 21..23 the second: backward 6 + 17 = 23.
    members = [CyclicMember(16, 0, 1), CyclicMember(2, 1, 0)]
    plan = cyclic_plan([10.0, 2.0], [1.0, 5.0], members, alpha=0.0, beta=1.0, piece=4)
    assert plan.order == ((0, 0, 8), (1, 0, 2), (0, 8, 16))
    assert plan.issue_after == (0, 1, 1)
    assert plan.update_order == ((1, 0), (0, 1))
    assert plan.period == 23.0
    # Without pieces the small one waits behind the large one, until 19.
    assert cyclic_plan([10.0, 2.0], [1.0, 5.0], members, alpha=0.0, beta=1.0, piece=None).period == 31.0


def test_updates_fill_the_time_in_which_compute_would_wait() -> None:
    # Member 0 is needed by block 0 and arrives at 11; member 1, needed by block 1, is there at 2: its update of 5
    # seconds runs while block 0 waits. Without that: 11 + 1 + 10 + 5 + 1.
    members = [CyclicMember(9, 1, 0, 1.0), CyclicMember(1, 0, 1, 5.0)]
    plan = cyclic_plan([10.0, 1.0], [1.0, 1.0], members, alpha=0.0, beta=1.0, piece=None)
    assert plan.update_order == ((1, 0), (0, 0))
    assert plan.period == 23.0


def test_host_work_slows_compute_only_while_messages_are_on_their_way() -> None:
    # 4 bytes for 4 seconds from time 2, of which the host needs 2: the backward gets 2 seconds done until 6, and its
    # last second until 7; the forward waits for nothing more.
    members = [CyclicMember(4, 0, 0)]
    plan = cyclic_plan([5.0], [2.0, 3.0], members, alpha=0.0, beta=1.0, piece=None, host=0.5)
    assert plan.period == 12.0
    assert period_bound([5.0], [2.0, 3.0], members, 0.0, 1.0, host=0.5) == 12.0
    # A message whose host work takes longer than its transfer stops compute altogether.
    assert cyclic_plan([5.0], [2.0, 3.0], members, alpha=0.0, beta=1.0, piece=None, host=2.0).period == 18.0


@settings(max_examples=40, deadline=None)
@given(loops(), alphas, st.sampled_from([0.0, 0.3]))
def test_chosen_piece_is_the_best_of_the_ladder(
    loop: tuple[list[float], list[float], list[CyclicMember]], alpha: float, host: float
) -> None:
    forward, backward, members = loop
    ladder = (2, 5, 16)
    choice = choose_piece(forward, backward, members, alpha, 0.5, host, pieces=ladder, merges=ladder)
    for piece in (None, *ladder):
        assert choice.plan.period <= close(cyclic_plan(forward, backward, members, alpha, 0.5, piece, host).period)
    assert sorted(index for group in choice.groups for index in group) == list(range(len(members)))
    merged = [
        CyclicMember(
            sum(members[i].nbytes for i in group),
            max(members[i].ready for i in group),
            min(members[i].need for i in group),
            sum(members[i].update for i in group),
        )
        for group in choice.groups
    ]
    assert choice.plan == cyclic_plan(forward, backward, merged, alpha, 0.5, choice.piece, host)


def test_small_members_are_merged_and_large_ones_cut() -> None:
    many = [CyclicMember(1000, i, 0) for i in range(50)]
    choice = choose_piece([1.0], [0.001] * 50, many, alpha=0.01, beta=1e-9, merges=(10_000, 100_000))
    assert len(choice.groups) < 10
    assert choice.plan.period < cyclic_plan([1.0], [0.001] * 50, many, 0.01, 1e-9, None).period
    mebibyte = 2**20
    pair = [CyclicMember(64 * mebibyte, 0, 1), CyclicMember(mebibyte, 1, 0)]
    cut = choose_piece([0.05, 0.01], [0.01, 0.02], pair, alpha=1e-5, beta=1e-9, merges=())
    assert cut.piece is not None and len(cut.plan.order) == 3
    assert cut.plan.period < cyclic_plan([0.05, 0.01], [0.01, 0.02], pair, 1e-5, 1e-9, None).period


def test_cyclic_refuses_what_it_cannot_mean() -> None:
    with pytest.raises(ConfigValueError, match=r"members\[0\].ready is 1; pass the index of one of the 1 backward"):
        cyclic_plan([1.0], [1.0], [CyclicMember(1, 1, 0)], 0.0, 1.0, None)
    with pytest.raises(ConfigValueError, match=r"members\[0\].need is 2; pass the index of one of the 1 forward"):
        cyclic_plan([1.0], [1.0], [CyclicMember(1, 0, 2)], 0.0, 1.0, None)
    with pytest.raises(ConfigValueError, match="piece is 0"):
        cyclic_plan([1.0], [1.0], [], 0.0, 1.0, 0)
    with pytest.raises(ConfigTypeError, match="whole number of bytes"):
        cyclic_plan([1.0], [1.0], [CyclicMember(1.5, 0, 0)], 0.0, 1.0, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigValueError, match="pieces is"):
        choose_piece([1.0], [1.0], [], 0.0, 1.0, pieces=(0,))
