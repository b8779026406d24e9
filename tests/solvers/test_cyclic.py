from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_fx.cost.numbers import EQUAL
from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.solvers.buckets.cyclic import CyclicMember, CyclicPlan, cyclic_plans
from commfuse_fx.solvers.buckets.piece_choices import PieceChoice, piece_choices
from tests.cost.plans import alphas, close, small


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


def fastest(plans: Sequence[CyclicPlan]) -> CyclicPlan:
    """With the fewest messages, and the first of those."""
    limit = min(plan.period for plan in plans) * (1 + EQUAL)
    return min((plan for plan in plans if plan.period <= limit), key=lambda plan: len(plan.order))


def cyclic_plan(
    forward: Sequence[float],
    backward: Sequence[float],
    members: Sequence[CyclicMember],
    alpha: float,
    beta: float,
    piece: int | None,
    host: float = 0.0,
) -> CyclicPlan:
    return fastest(cyclic_plans(forward, backward, members, alpha, beta, piece, host))


def choose_piece(
    forward: Sequence[float],
    backward: Sequence[float],
    members: Sequence[CyclicMember],
    alpha: float,
    beta: float,
    host: float = 0.0,
    **sizes: Sequence[int],
) -> PieceChoice:
    choices = [choice for choice, _ in piece_choices(forward, backward, members, alpha, beta, host, **sizes)]
    best = fastest([choice.plan for choice in choices])
    return next(choice for choice in choices if choice.plan is best)


def period_bound(
    forward: Sequence[float],
    backward: Sequence[float],
    members: Sequence[CyclicMember],
    alpha: float,
    beta: float,
    host: float = 0.0,
) -> float:
    """No plan is faster than all that is computed, or than all that is sent."""
    compute = sum(forward) + sum(backward) + sum(member.update for member in members)
    compute += host * sum(member.nbytes for member in members)
    sent = sum(max(alpha + beta * member.nbytes, host * member.nbytes) for member in members)
    return max(compute, sent)


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


def test_while_compute_waits_it_updates_first_what_came_first() -> None:
    # Members 0 and 1 are there at 2 and 3, member 2, needed first, at 15. It does not matter for the period which of
    # the others is updated from 5 on; but member 1 might be late.
    def order(update: float) -> tuple[tuple[int, int], ...]:
        members = [CyclicMember(1, 0, 2, update), CyclicMember(1, 0, 1, 2.0), CyclicMember(10, 1, 0)]
        return cyclic_plan([1.0, 1.0, 1.0], [1.0, 4.0], members, alpha=0.0, beta=1.0, piece=None).update_order

    assert order(2.0) == ((0, 0), (1, 0), (2, 0))
    # By the end of a long update member 2 has come, and what is needed goes first.
    assert order(20.0) == ((0, 0), (2, 0), (1, 1))


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


def test_gradients_that_were_put_off_are_not_merged_with_urgent_ones() -> None:
    """Two layers of the front, ready last but for one of the back: the forward comes to that much later."""
    members = [CyclicMember(2**20, 0, 2), CyclicMember(2**20, 1, 0), CyclicMember(2**20, 2, 3)]
    choices = piece_choices([1.0] * 4, [1.0] * 4, members, 1e-3, 1e-9, merges=(2**30,))
    groups = list(dict.fromkeys(choice.groups for choice, _ in choices))
    assert groups == [((0,), (1,), (2,)), ((0, 1, 2),), ((0, 1), (2,))]


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
