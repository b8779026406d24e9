from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commfuse_fx.solvers.buckets.assign_buckets import Bucketing, Conflict, Member, Policy, assign_buckets

OFF = Policy(enabled=False, threshold=None, cuts=None)
UNLIMITED = Policy(enabled=True, threshold=1 << 60, cuts=None)


def size(threshold: int) -> Policy:
    return Policy(enabled=True, threshold=threshold, cuts=None)


def index(*cuts: int) -> Policy:
    return Policy(enabled=True, threshold=None, cuts=cuts)


def make(
    sizes: Sequence[int],
    keys: Sequence[str] | str | None = None,
    ids: Sequence[int | None] | None = None,
    sequence: Sequence[int] | None = None,
) -> list[Member]:
    count = len(sizes)
    keys = keys or ["f32"] * count
    ids = ids or [None] * count
    sequence = sequence or range(count)
    return [Member(f"p{i}", keys[i], sizes[i], ids[i], sequence[i]) for i in range(count)]


def assign(members: Sequence[Member], policy: Policy, edges: Sequence[tuple[int, int]] = ()) -> Bucketing:
    direct: list[list[int]] = [[] for _ in members]
    for before, after in edges:
        direct[after].append(before)
    return assign_buckets(members, direct, lambda member: policy)


@pytest.mark.parametrize(
    ("sizes", "keys", "threshold", "buckets"),
    [
        pytest.param([], "", 10, [], id="nothing"),
        pytest.param([4], "a", 10, [[0]], id="one"),
        pytest.param([4, 4, 4], "aaa", 100, [[0, 1, 2]], id="all-fit"),
        pytest.param([5, 5, 1], "aaa", 10, [[0, 1], [2]], id="exactly-full"),
        pytest.param([5, 6, 4], "aaa", 10, [[0], [1, 2]], id="next-would-go-over"),
        pytest.param([4, 4, 4, 4], "abab", 8, [[0, 2], [1, 3]], id="alternating-keys"),
        pytest.param([4] * 8, "abababab", 8, [[0, 2], [1, 3], [4, 6], [5, 7]], id="one-open-bucket-per-key"),
        pytest.param([2, 99, 2], "aaa", 10, [[0], [1], [2]], id="oversize-closes-the-open-bucket"),
        pytest.param([99, 2, 2], "aaa", 10, [[0], [1, 2]], id="oversize-first"),
        pytest.param([2, 99, 2], "aba", 10, [[1], [0, 2]], id="oversize-of-another-key"),
        pytest.param([10, 1, 1], "aaa", 10, [[0], [1, 2]], id="as-large-as-the-threshold"),
        pytest.param([9, 2, 1, 9], "aaaa", 10, [[0], [1, 2], [3]], id="never-goes-back"),
    ],
)
def test_size(sizes: list[int], keys: str, threshold: int, buckets: list[list[int]]) -> None:
    result = assign(make(sizes, keys), size(threshold))
    assert [list(bucket) for bucket in result.buckets] == buckets
    assert result.conflicts == ()
    assert result.ignored_cuts == ()


@pytest.mark.parametrize(
    ("count", "keys", "cuts", "buckets", "ignored"),
    [
        pytest.param(21, None, (20,), [list(range(20)), [20]], (), id="20+1"),
        pytest.param(4, None, (1, 3), [[0], [1, 2], [3]], (), id="two-cuts"),
        pytest.param(4, None, (4,), [[0, 1, 2, 3]], (4,), id="cut-at-the-count"),
        pytest.param(4, None, (2, 9, 20), [[0, 1], [2, 3]], (9, 20), id="cuts-past-the-count"),
        pytest.param(4, "abab", (2,), [[0], [1], [2], [3]], (), id="cuts-per-key"),
        pytest.param(6, "ababab", (3,), [[1], [0, 2], [4], [3, 5]], (), id="one-sequence-for-all-keys"),
        pytest.param(4, "abab", (3,), [[1], [0, 2], [3]], (), id="count-is-over-all-keys"),
    ],
)
def test_index(
    count: int, keys: str | None, cuts: tuple[int, ...], buckets: list[list[int]], ignored: tuple[int, ...]
) -> None:
    result = assign(make([1] * count, keys), index(*cuts))
    assert [list(bucket) for bucket in result.buckets] == buckets
    assert result.ignored_cuts == ignored


def test_seed_text_cuts() -> None:
    result = assign(make([1] * 40), index(20, 35))
    assert result.buckets == (tuple(range(20)), tuple(range(20, 35)), tuple(range(35, 40)))


def test_index_goes_by_sequence_and_not_by_readiness() -> None:
    assert assign(make([1] * 4, sequence=[3, 2, 1, 0]), index(1)).buckets == ((0, 1, 2), (3,))


def test_index_with_gaps_in_the_sequence() -> None:
    result = assign(make([1] * 4, sequence=[0, 7, 9, 30]), index(2, 8))
    assert result.buckets == ((0,), (1, 2, 3))
    assert result.ignored_cuts == (8,)


@pytest.mark.parametrize(
    ("keys", "ids", "policy", "buckets"),
    [
        pytest.param("aaaa", [1, 1, 2, 2], size(1), [[0, 1], [2, 3]], id="whatever-the-size"),
        pytest.param("aaaa", [1, None, 1, None], index(1), [[0, 2], [1, 3]], id="over-index"),
        pytest.param("abab", [1, 1, 1, 1], size(1), [[0, 2], [1, 3]], id="per-key"),
        pytest.param("aaaa", [None, 0, None, 0], size(100), [[1], [0, 2], [3]], id="zero-stands-alone"),
        pytest.param("aaaa", [None, 5, None, 5], size(20), [[0, 2], [1, 3]], id="takes-no-room-in-a-bucket"),
        pytest.param("aaaa", [1, 1, 1, 1], OFF, [[0], [1], [2], [3]], id="disabled"),
        pytest.param("aaaa", [None, 3, None, 3], Policy(True, None, None), [[0], [2], [1, 3]], id="no-limit-given"),
    ],
)
def test_explicit_ids(keys: str, ids: list[int | None], policy: Policy, buckets: list[list[int]]) -> None:
    result = assign(make([10] * len(keys), keys, ids), policy)
    assert [list(bucket) for bucket in result.buckets] == buckets


def test_explicit_ids_count_towards_the_cuts() -> None:
    result = assign(make([1] * 4, ids=[None, None, 7, 0]), index(3, 4))
    assert result.ignored_cuts == (4,)


def test_disabled_reports_no_cuts() -> None:
    assert assign(make([1] * 3), Policy(False, None, (9,))).ignored_cuts == ()


def test_one_policy_per_key() -> None:
    policies = {"reduce": index(2, 5), "gather": size(2), "scatter": OFF}
    members = make([1] * 9, ["reduce"] * 3 + ["gather"] * 3 + ["scatter"] * 3)
    result = assign_buckets(members, [()] * 9, lambda member: policies[str(member.key)])
    assert result.buckets == ((0, 1), (2,), (3, 4), (5,), (6,), (7,), (8,))
    assert result.ignored_cuts == (5,)


def by_group(groups: Sequence[int | None], edges: Sequence[tuple[int, int]] = (), **given: Any) -> Bucketing:
    """Members of 1 byte under policies that number their buckets."""
    members = make([1] * len(groups), **given)
    direct: list[list[int]] = [[] for _ in members]
    for before, after in edges:
        direct[after].append(before)
    numbers = {id(member): group for member, group in zip(members, groups, strict=True)}
    return assign_buckets(members, direct, lambda member: Policy(True, None, None, numbers[id(member)]))


@pytest.mark.parametrize(
    ("groups", "given", "buckets"),
    [
        pytest.param([0, 0, 1, 1], {}, [[0, 1], [2, 3]], id="neighbours"),
        pytest.param([0, 1, 0, 1], {}, [[0, 2], [1, 3]], id="interleaved"),
        pytest.param([7, 7, 7], {"keys": "aba"}, [[1], [0, 2]], id="per-key"),
        pytest.param([0, None, 0, None], {}, [[1], [0, 2], [3]], id="no-number-stands-alone"),
        pytest.param([0, 0, 0, 0], {"ids": [None, 0, 5, 5]}, [[0], [1], [2, 3]], id="explicit-ids-win"),
    ],
)
def test_numbered_groups(groups: list[int | None], given: dict[str, Any], buckets: list[list[int]]) -> None:
    assert [list(bucket) for bucket in by_group(groups, **given).buckets] == buckets


def test_an_illegal_numbered_group_is_split() -> None:
    result = by_group([0, 0, 0], [(0, 1)])
    assert [list(bucket) for bucket in result.buckets] == [[1], [0, 2]]
    assert result.conflicts == (Conflict("p0", "p1", ("p0", "p1")),)


def test_chains_of_two_give_two_buckets() -> None:
    result = assign(make([1] * 4), UNLIMITED, [(0, 1), (2, 3)])
    assert result.buckets == ((0, 2), (1, 3))
    assert result.conflicts == (Conflict("p0", "p1", ("p0", "p1")),)


def test_a_chain_is_not_fused() -> None:
    result = assign(make([1] * 3), UNLIMITED, [(0, 1), (1, 2)])
    assert result.buckets == ((0,), (1,), (2,))
    assert [conflict.path for conflict in result.conflicts] == [("p0", "p1"), ("p1", "p2")]


def test_path_through_another_key() -> None:
    result = assign(make([1] * 4, "abca"), UNLIMITED, [(0, 1), (1, 2), (2, 3)])
    assert result.buckets == ((0,), (1,), (2,), (3,))
    assert result.conflicts == (Conflict("p0", "p3", ("p0", "p1", "p2", "p3")),)


def test_the_shortest_path_is_named() -> None:
    result = assign(make([1] * 5, "abbba"), size(1 << 20), [(0, 1), (1, 2), (2, 4), (0, 3), (3, 4)])
    assert Conflict("p0", "p4", ("p0", "p3", "p4")) in result.conflicts


def test_a_bucket_that_would_close_a_cycle_is_split() -> None:
    # a1 -> b1 and b2 -> a2
    result = assign(make([1] * 4, "abba"), UNLIMITED, [(0, 1), (2, 3)])
    assert result.buckets == ((1,), (2,), (0, 3))
    assert result.conflicts == (Conflict("p2", "p1", ("p2", "p3", "p0", "p1")),)


def test_a_cycle_over_three_buckets_is_split_once() -> None:
    result = assign(make([1] * 6, "abbcca"), UNLIMITED, [(0, 1), (2, 3), (4, 5)])
    assert result.buckets == ((1, 2), (3,), (4,), (0, 5))
    assert result.conflicts == (Conflict("p4", "p3", ("p4", "p5", "p0", "p1", "p2", "p3")),)


def test_dependences_between_buckets_are_legal() -> None:
    result = assign(make([1] * 4, "aabb"), UNLIMITED, [(0, 2), (1, 3), (0, 3)])
    assert result == Bucketing(((0, 1), (2, 3)), (), ())


def test_illegal_explicit_id_is_split() -> None:
    result = assign(make([1] * 2, ids=[4, 4]), size(1), [(0, 1)])
    assert result.buckets == ((0,), (1,))
    assert len(result.conflicts) == 1


@pytest.mark.parametrize("direct", [[[]], [[], [1]], [[], [-1]], [[1], []]])
def test_malformed_dependences_are_refused(direct: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="direct"):
        assign_buckets(make([1, 1]), direct, lambda member: UNLIMITED)


def is_acyclic(edges: Sequence[tuple[int, int]], buckets: Sequence[Sequence[int]]) -> bool:
    owner = {member: number for number, bucket in enumerate(buckets) for member in bucket}
    contracted = {(owner[before], owner[after]) for before, after in edges}
    left = set(range(len(buckets)))
    while left:
        free = {node for node in left if not any((other, node) in contracted for other in left)}
        if not free:
            return False
        left -= free
    return True


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for place, block in enumerate(rest):
            yield [*rest[:place], [items[0], *block], *rest[place + 1 :]]


@st.composite
def dags(draw: st.DrawFn, count: int) -> list[tuple[int, int]]:
    pairs = [(before, after) for after in range(count) for before in range(after)]
    return draw(st.lists(st.sampled_from(pairs), unique=True, max_size=2 * count)) if pairs else []


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Member], Policy, list[tuple[int, int]]]:
    count = draw(st.integers(0, 14))

    def column(values: st.SearchStrategy[int | str | None]) -> list[int | str | None]:
        return draw(st.lists(values, min_size=count, max_size=count))

    members = make(
        column(st.integers(1, 12)),  # type: ignore[arg-type]
        column(st.sampled_from("abc")),  # type: ignore[arg-type]
        column(st.sampled_from([None, None, None, 0, 1, 2])),  # type: ignore[arg-type]
        draw(st.permutations(range(count))),
    )
    cuts = st.lists(st.integers(1, 20), min_size=1, unique=True).map(lambda cuts: index(*sorted(cuts)))
    policy = draw(st.one_of(st.just(OFF), st.integers(1, 40).map(size), st.just(UNLIMITED), cuts))
    return members, policy, draw(dags(count))


@given(problems())
def test_result_is_a_legal_partition(problem: tuple[list[Member], Policy, list[tuple[int, int]]]) -> None:
    members, policy, edges = problem
    result = assign(members, policy, edges)
    assert sorted(member for bucket in result.buckets for member in bucket) == list(range(len(members)))
    assert [bucket[-1] for bucket in result.buckets] == sorted(max(bucket) for bucket in result.buckets)
    for bucket in result.buckets:
        assert list(bucket) == sorted(bucket)
        assert len({(members[i].key, members[i].fusion_id) for i in bucket}) == 1
        if policy.threshold and members[bucket[0]].fusion_id is None and len(bucket) > 1:
            assert sum(members[i].nbytes for i in bucket) <= policy.threshold
    assert is_acyclic(edges, result.buckets)


@given(problems())
def test_conflict_paths_are_real(problem: tuple[list[Member], Policy, list[tuple[int, int]]]) -> None:
    members, policy, edges = problem
    result = assign(members, policy, edges)
    wanted = assign(members, policy)
    owner = {f"p{member}": number for number, bucket in enumerate(result.buckets) for member in bucket}
    named = {(f"p{before}", f"p{after}") for before, after in edges}
    assert len(result.buckets) == len(wanted.buckets) + len(result.conflicts)
    for conflict in result.conflicts:
        assert (conflict.first, conflict.second) == (conflict.path[0], conflict.path[-1])
        assert owner[conflict.first] != owner[conflict.second]
        for step in zip(conflict.path, conflict.path[1:], strict=False):
            assert step in named or owner[step[0]] == owner[step[1]]


@given(st.data())
def test_one_bucket_is_split_into_the_fewest_groups(data: st.DataObject) -> None:
    inside, outside = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 3))
    keys = data.draw(st.permutations(["a"] * inside + [f"other{i}" for i in range(outside)]))
    edges = data.draw(dags(len(keys)))
    bucket = [i for i, key in enumerate(keys) if key == "a"]
    others = [[i] for i, key in enumerate(keys) if key != "a"]
    fewest = min(len(split) for split in partitions(bucket) if is_acyclic(edges, [*others, *split]))
    result = assign(make([1] * len(keys), keys), UNLIMITED, edges)
    assert len(result.buckets) - outside == fewest


@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_edges_does_not_matter(
    problem: tuple[list[Member], Policy, list[tuple[int, int]]], shuffler: random.Random
) -> None:
    members, policy, edges = problem
    shuffled = list(edges)
    shuffler.shuffle(shuffled)
    assert assign(members, policy, edges) == assign(members, policy, edges) == assign(members, policy, shuffled)


@pytest.mark.parametrize("window", [0, 50], ids=["layers", "one-key"])
def test_twenty_thousand_members(window: int) -> None:
    """Layers that depend on the layer before are legal; a window of earlier members of one key is not."""
    count, width, draw = 20_000, 100, random.Random(0)
    keys = ["f32" if window else f"layer{i // width}" for i in range(count)]
    edges = []
    for after in range(width, count):
        layer = after // width * width
        sources = range(after - window, after) if window else range(layer - width, layer)
        edges += [(draw.choice(sources), after) for _ in range(3)]
    result = assign(make([1] * count, keys), size(50), edges)
    assert sum(len(bucket) for bucket in result.buckets) == count
    assert bool(result.conflicts) == bool(window)
    if not window:
        assert len(result.buckets) == count // 50
