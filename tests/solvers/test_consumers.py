from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.solvers.buckets.compute_program import Item, simulate_plan
from commfuse_fx.solvers.buckets.consumers import optimal_plan, starting_plans
from tests.cost.plans import alphas, ordered_partitions, small


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


def every_plan(
    items: list[Item],
    sizes: list[float],
    alpha: float,
    beta: float,
    wanted: Callable[[Sequence[Sequence[int]]], bool] = lambda plan: True,
) -> list[tuple[float, int]]:
    found = []
    for partition in filter(wanted, ordered_partitions(range(len(sizes)))):
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
@given(programs(4), alphas, st.sampled_from([0.0, 1.0]))
def test_order_without_merging_matches_every_order(
    program: tuple[list[Item], list[float]], alpha: float, beta: float
) -> None:
    items, sizes = program
    best, _ = min(every_plan(items, sizes, alpha, beta, lambda plan: all(len(bucket) == 1 for bucket in plan)))
    for exact_limit in (8, 0):
        plan = optimal_plan(items, sizes, alpha, beta, exact_limit, merge=False)
        assert all(len(bucket) == 1 for bucket in plan.buckets)
        assert plan.finish == simulate_plan(items, sizes, alpha, beta, plan.buckets)
        assert plan.finish >= best and (plan.finish == best or not exact_limit)


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
