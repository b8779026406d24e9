from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commfuse_fx.cost.collective_cost import CollectiveCost, algorithms, bus_bandwidth, collective_cost
from commfuse_fx.cost.collective_formulas import COLLECTIVES
from commfuse_fx.errors import CommFuseError, ConfigTypeError, ConfigValueError
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.machine.cluster_parts import Device, Level
from commfuse_fx.machine.presets import preset

DEVICE = Device(name="d", flops={"f32": 1e12}, memory_bandwidth=1e11, memory_bytes=10**9, op_overhead=1e-6)
ALPHA, BANDWIDTH, HOST = 10e-6, 1e9, 0.5e-9
FLAT = ClusterSpec(
    name="flat",
    device=DEVICE,
    levels=(Level(name="net", alpha=ALPHA, bandwidth=BANDWIDTH, host_seconds_per_byte=HOST),),
)
HOSTS = ClusterSpec(
    name="hosts",
    device=DEVICE,
    levels=(
        Level(name="in", domains=8, alpha=2e-6, bandwidth=100e9),
        Level(name="out", alpha=10e-6, bandwidth=10e9, host_seconds_per_byte=1e-10),
    ),
    ranks=64,
)


def on_flat(kind: str, nbytes: int, k: int, algorithm: str | None = None) -> CollectiveCost:
    return collective_cost(kind, nbytes, range(k), FLAT, algorithm)


# (kind, algorithm, ranks, messages, bytes of the busiest rank), worked out by hand for a payload of 8,000,000 bytes.
WORKED_OUT = [
    ("all_reduce", "ring", 4, 6, 12_000_000),
    ("all_reduce", "ring", 5, 8, 12_800_000),
    ("all_reduce", "ring", 2, 2, 8_000_000),
    ("all_reduce", "tree", 2, 2, 8_000_000),
    ("all_reduce", "tree", 4, 4, 16_000_000),
    ("all_reduce", "tree", 5, 6, 16_000_000),
    ("all_reduce", "recursive", 4, 4, 12_000_000),
    ("all_reduce", "recursive", 8, 6, 14_000_000),
    ("all_gather", "ring", 4, 3, 6_000_000),
    ("all_gather", "recursive", 8, 3, 7_000_000),
    ("reduce_scatter", "ring", 5, 4, 6_400_000),
    ("reduce_scatter", "recursive", 4, 2, 6_000_000),
    ("broadcast", "tree", 4, 2, 16_000_000),
    ("broadcast", "tree", 5, 3, 24_000_000),
    ("broadcast", "ring", 4, 3, 8_000_000),
    ("broadcast", "scatter", 4, 5, 12_000_000),
    ("reduce", "tree", 8, 3, 24_000_000),
    ("reduce", "ring", 8, 7, 8_000_000),
    ("reduce", "scatter", 8, 10, 14_000_000),
    ("gather", "tree", 4, 2, 6_000_000),
    ("gather", "tree", 5, 3, 6_400_000),
    ("scatter", "tree", 8, 3, 7_000_000),
    ("all_to_all", "pairwise", 4, 3, 6_000_000),
    ("barrier", "dissemination", 5, 3, 0),
    ("barrier", "dissemination", 8, 3, 0),
    ("send_recv", "direct", 2, 1, 8_000_000),
]


@pytest.mark.parametrize("kind, algorithm, k, messages, moved", WORKED_OUT)
def test_formulas(kind: str, algorithm: str, k: int, messages: int, moved: int) -> None:
    cost = on_flat(kind, 8_000_000, k, algorithm)
    assert (cost.kind, cost.algorithm, cost.links) == (kind, algorithm, ("net",))
    assert cost.latency == pytest.approx(messages * ALPHA)
    assert cost.transfer == pytest.approx(moved / BANDWIDTH)
    assert cost.host == pytest.approx(moved * HOST)
    assert cost.seconds == pytest.approx(messages * ALPHA + moved / BANDWIDTH)


def test_every_formula_is_worked_out() -> None:
    flat = {(kind, name) for kind in COLLECTIVES for name in algorithms(kind) if name != "hierarchical"}
    assert flat == {row[:2] for row in WORKED_OUT}


@pytest.mark.parametrize(
    ("kind", "nbytes", "k", "best"),
    [
        ("all_reduce", 1 << 30, 6, "ring"),
        ("all_reduce", 64, 6, "tree"),
        ("all_reduce", 1 << 30, 8, "recursive"),
        ("all_gather", 64, 6, "ring"),
        ("all_gather", 64, 8, "recursive"),
        ("broadcast", 64, 16, "tree"),
        ("broadcast", 1 << 30, 16, "ring"),
    ],
)
def test_the_cheapest_algorithm_is_taken(kind: str, nbytes: int, k: int, best: str) -> None:
    assert on_flat(kind, nbytes, k).algorithm == best


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("algorithm", [None, "first", "last"])
def test_one_rank_costs_nothing(kind: str, algorithm: str | None) -> None:
    chosen = {"first": algorithms(kind)[0], "last": algorithms(kind)[-1]}.get(algorithm or "")
    cost = collective_cost(kind, 1 << 20, (3,), HOSTS, chosen)
    assert cost == CollectiveCost(kind, "none", 0.0, 0.0, 0.0, 0.0, 0.0, ())


# Several levels


def test_a_group_inside_a_host_uses_the_links_inside() -> None:
    cost = collective_cost("all_reduce", 8_000_000, range(8, 16), HOSTS, "ring")
    assert cost.links == ("in",) and cost.host == 0
    assert cost.seconds == pytest.approx(14 * 2e-6 + 14_000_000 / 100e9)


def test_a_strided_group_is_priced_as_crossing_hosts() -> None:
    strided, inside = (collective_cost("all_reduce", 8_000_000, ranks, HOSTS) for ranks in (range(0, 64, 8), range(8)))
    assert strided.links == ("out",)
    assert strided.seconds == pytest.approx(6 * 10e-6 + 14_000_000 / 10e9)
    assert strided.seconds > 5 * inside.seconds
    assert collective_cost("all_reduce", 8_000_000, range(3, 64, 8), HOSTS) == strided


def test_flat_algorithms_go_at_the_pace_of_the_slowest_level() -> None:
    cost = collective_cost("all_reduce", 8_000_000, range(16), HOSTS, "ring")
    assert cost.links == ("in", "out")
    assert cost.seconds == pytest.approx(30 * 10e-6 + 15_000_000 / 10e9)
    assert cost.host == pytest.approx(15_000_000 * 1e-10)


# (kind, latency, transfer, bytes over "out"), by hand: 64 ranks, 8 per host, 8,000,000 bytes, the cheapest stages.
HIERARCHICAL = [
    ("all_reduce", 2 * 3 * 2e-6 + 6 * 10e-6, 14e6 / 100e9 + 1.75e6 / 10e9, 1.75e6),
    ("all_gather", 3 * 2e-6 + 3 * 10e-6, 7e6 / 100e9 + 0.875e6 / 10e9, 0.875e6),
    ("reduce_scatter", 3 * 2e-6 + 3 * 10e-6, 7e6 / 100e9 + 0.875e6 / 10e9, 0.875e6),
    ("broadcast", 7 * 2e-6 + 7 * 10e-6, 8e6 / 100e9 + 8e6 / 10e9, 8e6),
    ("reduce", 7 * 2e-6 + 7 * 10e-6, 8e6 / 100e9 + 8e6 / 10e9, 8e6),
    ("gather", 3 * 2e-6 + 3 * 10e-6, 0.875e6 / 100e9 + 7e6 / 10e9, 7e6),
    ("scatter", 3 * 2e-6 + 3 * 10e-6, 0.875e6 / 100e9 + 7e6 / 10e9, 7e6),
    ("all_to_all", 7 * 2e-6 + 7 * 10e-6, 7e6 / 100e9 + 7e6 / 10e9, 7e6),
    ("barrier", 2 * 3 * 2e-6 + 3 * 10e-6, 0, 0),
]


@pytest.mark.parametrize("kind, latency, transfer, crossing", HIERARCHICAL)
def test_hierarchical_is_the_sum_over_the_levels(kind: str, latency: float, transfer: float, crossing: float) -> None:
    cost = collective_cost(kind, 8_000_000, range(64), HOSTS, "hierarchical")
    assert cost.links == ("in", "out")
    assert cost.latency == pytest.approx(latency)
    assert cost.transfer == pytest.approx(transfer)
    assert cost.host == pytest.approx(crossing * 1e-10)


def test_every_hierarchy_is_worked_out() -> None:
    assert {row[0] for row in HIERARCHICAL} == {kind for kind in COLLECTIVES if "hierarchical" in algorithms(kind)}


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("nbytes", [1024, 1 << 28])
def test_hierarchical_beats_flat_across_hosts(kind: str, nbytes: int) -> None:
    cluster, world = preset("h100-ib-16"), range(128)
    flat = min(collective_cost(kind, nbytes, world, cluster, name).seconds for name in ("ring", "recursive"))
    best = collective_cost(kind, nbytes, world, cluster)
    assert best.algorithm == "hierarchical" and best.seconds < flat


def test_flat_beats_hierarchical_where_a_message_would_only_take_longer() -> None:
    """Two equally fast levels: sorting twice only moves all_to_all's bytes twice."""
    level = {"alpha": 1e-6, "bandwidth": 1e9}
    levels = (Level(name="in", domains=2, **level), Level(name="out", **level))  # type: ignore[arg-type]
    cluster = ClusterSpec(name="c", device=DEVICE, levels=levels, ranks=4)
    assert collective_cost("all_to_all", 1 << 20, range(4), cluster).algorithm == "pairwise"


def test_each_stage_takes_its_cheapest_algorithm() -> None:
    """Three hosts, a small payload: a tree across them, although rings are cheaper for large ones."""
    small, large = (collective_cost("all_reduce", n, range(24), HOSTS, "hierarchical") for n in (8, 1 << 30))
    assert small.latency == pytest.approx(2 * 3 * 2e-6 + 2 * 2 * 10e-6)
    assert large.transfer == pytest.approx((1 << 30) * (2 * 7 / 8 / 100e9 + 2 * 2 / 3 / 8 / 10e9))


def test_three_levels() -> None:
    levels = tuple(
        Level(name=name, domains=domains, alpha=0, bandwidth=bandwidth)
        for name, domains, bandwidth in (("a", 2, 4e9), ("b", 4, 2e9), ("c", None, 1e9))
    )
    cluster = ClusterSpec(name="c", device=DEVICE, levels=levels, ranks=8)
    cost = collective_cost("all_reduce", 8_000_000, range(8), cluster, "hierarchical")
    # On each level 2 * (2-1)/2 of what is left: 8, 4, 2 MB.
    assert cost.seconds == pytest.approx(8e6 / 4e9 + 4e6 / 2e9 + 2e6 / 1e9)
    assert cost.links == ("a", "b", "c")


def test_4096_ranks() -> None:
    cluster, world = preset("h100-ib-512"), tuple(range(4096))
    for kind in COLLECTIVES:
        cost = collective_cost(kind, 1 << 30, world, cluster)
        assert cost.seconds > 0 and cost.links == ("nvlink", "infiniband")
    strided = collective_cost("all_reduce", 1 << 30, world[::8], cluster)
    assert strided.links == ("infiniband",)


# Properties


@given(
    st.sampled_from(COLLECTIVES),
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 40),
    st.sets(st.integers(0, 63), min_size=1),
)
def test_more_bytes_never_cost_less(kind: str, one: int, other: int, ranks: set[int]) -> None:
    group = sorted(ranks)
    for algorithm in (None, algorithms(kind)[0]):
        less, more = (collective_cost(kind, n, group, HOSTS, algorithm) for n in sorted((one, other)))
        assert 0 <= less.seconds <= more.seconds
        assert less.seconds == less.latency + less.transfer
        assert less.links == more.links


@given(st.sampled_from(COLLECTIVES), st.integers(0, 1 << 40), st.sets(st.integers(0, 63), min_size=2))
def test_no_algorithm_is_cheaper_than_the_chosen_one(kind: str, nbytes: int, ranks: set[int]) -> None:
    group = sorted(ranks)
    best = collective_cost(kind, nbytes, group, HOSTS)
    for algorithm in algorithms(kind):
        try:
            cost = collective_cost(kind, nbytes, group, HOSTS, algorithm)
        except ConfigValueError:
            assert algorithm != best.algorithm
            continue
        assert cost.algorithm == algorithm and best.seconds <= cost.seconds
        if algorithm == best.algorithm:
            assert cost == best


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_cost_is_a_function_of_its_arguments_alone(kind: str) -> None:
    """Neither what was asked before nor the order of the ranks changes a price."""
    orders = [list(order) for order in itertools.permutations((0, 1, 8, 9))]
    fresh = [ClusterSpec(name="hosts", device=DEVICE, levels=HOSTS.levels, ranks=64) for _ in orders]
    for spec in fresh[::2]:
        collective_cost(kind, 1, (0, 1, 8, 9), spec)
    costs = [collective_cost(kind, 1 << 24, order, spec) for order, spec in zip(orders, fresh, strict=True)]
    assert costs == costs[:1] * len(costs)


# Bus bandwidth


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("gather", 0.75),
        ("scatter", 0.75),
        ("broadcast", 1),
        ("reduce", 1),
        ("send_recv", 1),
    ],
)
def test_bus_bandwidth(kind: str, factor: float) -> None:
    assert bus_bandwidth(kind, 1000, 4, 2.0) == pytest.approx(factor * 500)
    cost = on_flat(kind, 1 << 20, 4)
    assert cost.bus_bandwidth == pytest.approx(factor * (1 << 20) / cost.seconds)


def test_bus_bandwidth_of_a_ring_approaches_that_of_the_link() -> None:
    assert on_flat("all_reduce", 1 << 36, 7, "ring").bus_bandwidth == pytest.approx(BANDWIDTH, rel=1e-3)


def test_bus_bandwidth_of_what_takes_no_time_is_zero() -> None:
    free = ClusterSpec(name="c", device=DEVICE, levels=(Level(name="net", alpha=0, bandwidth=1),))
    assert collective_cost("barrier", 0, range(2), free).bus_bandwidth == 0
    assert on_flat("barrier", 0, 2).bus_bandwidth == 0


# Errors


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kind": "allreduce"}, ConfigValueError, "kind is 'allreduce', which is unknown; use one of \"all_reduce\""),
        ({"kind": None}, ConfigTypeError, "kind is None; give one of"),
        ({"nbytes": -1}, ConfigValueError, "nbytes is -1; give a finite number >= 0"),
        ({"nbytes": "1"}, ConfigTypeError, "nbytes is '1'; give a finite number >= 0"),
        ({"nbytes": float("nan")}, ConfigValueError, "nbytes is nan; give"),
        ({"ranks": (0, 64)}, ConfigValueError, "the group has rank 64, but cluster hosts has 64 ranks"),
        ({"ranks": ()}, ConfigValueError, "the group is empty"),
        (
            {"algorithm": "pairwise"},
            ConfigValueError,
            "algorithm of all_reduce is 'pairwise', which is unknown; use one",
        ),
        ({"algorithm": 3}, ConfigTypeError, "algorithm of all_reduce is 3; give one of"),
        ({"algorithm": "recursive", "ranks": range(6)}, ConfigValueError, "the group has 6 ranks, not a power of two"),
        ({"algorithm": "hierarchical"}, ConfigValueError, "on cluster hosts the group only spans in; give another one"),
        (
            {"algorithm": "hierarchical", "ranks": (0, 1, 8)},
            ConfigValueError,
            "on cluster hosts the group has parts of different sizes on in and out; give another one",
        ),
        ({"kind": "send_recv", "algorithm": "hierarchical"}, ConfigValueError, 'which is unknown; use one of "direct"'),
    ],
)
def test_bad_arguments(changes: dict[str, Any], error: type[CommFuseError], message: str) -> None:
    arguments = {"kind": "all_reduce", "nbytes": 8, "ranks": range(8), "cluster": HOSTS, "algorithm": None}
    with pytest.raises(error, match=message):
        collective_cost(**{**arguments, **changes})


def test_algorithms_of_an_unknown_kind() -> None:
    with pytest.raises(ConfigValueError, match="kind is 'sum', which is unknown"):
        algorithms("sum")


def test_a_cluster_is_named_as_everywhere(tmp_path: Path) -> None:
    cluster = preset("h100-ib-2")
    cluster.save(tmp_path / "mine.json")
    cost = collective_cost("all_reduce", 1 << 20, range(16), cluster)
    for named in ("h100-ib-2", tmp_path / "mine.json", str(tmp_path / "mine.json")):
        assert collective_cost("all_reduce", 1 << 20, range(16), named) == cost


@pytest.mark.parametrize("cluster", [None, 5, (0, 1)])
def test_what_is_no_cluster_is_refused(cluster: Any) -> None:
    message = f"cluster is {cluster!r}; give a ClusterSpec, the name of a preset, or a path"
    with pytest.raises(ConfigTypeError, match=re.escape(message)):
        collective_cost("all_reduce", 1, (0, 1), cluster)
