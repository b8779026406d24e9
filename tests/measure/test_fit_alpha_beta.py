"""Latency and bandwidth come back from samples that were made with them."""

from __future__ import annotations

import pytest

from commfuse_fx.cost.collective_cost import collective_cost
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.machine.cluster_parts import Device, Level
from commfuse_fx.measure.fit_alpha_beta import Sample, fit

SIZES = [1024 * 4**i for i in range(9)]
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def samples(alpha: float, bandwidth: float, ranks: int = 2, noise: float = 0.0) -> list[Sample]:
    """Noise goes up and down by the same factor in turn."""
    found = []
    for number, (kind, nbytes) in enumerate((kind, nbytes) for nbytes in SIZES for kind in KINDS):
        exact = Sample(kind, ranks, nbytes, 1.0)
        seconds = exact.messages * alpha + exact.wire_bytes / bandwidth
        found.append(Sample(kind, ranks, nbytes, seconds * (1 + noise) ** (1 if number % 2 else -1)))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(("alpha", "bandwidth"), [(1e-4, 1e9), (5e-6, 4e11), (2e-3, 1e6)])
def test_exact_samples_give_the_exact_level(alpha: float, bandwidth: float, ranks: int) -> None:
    found = fit(samples(alpha, bandwidth, ranks))
    assert found.alpha == pytest.approx(alpha, rel=1e-6)
    assert found.bandwidth == pytest.approx(bandwidth, rel=1e-6)
    assert found.max_error < 1e-6


@pytest.mark.parametrize("ranks", [2, 8])
def test_noisy_samples_give_nearly_the_level(ranks: int) -> None:
    found = fit(samples(1e-4, 1e9, ranks, noise=0.3))
    assert found.alpha == pytest.approx(1e-4, rel=0.1)
    assert found.bandwidth == pytest.approx(1e9, rel=0.1)
    assert 0.2 < found.median_error < 0.4
    assert found.median_error <= found.max_error < 0.6


def test_small_and_large_sizes_count_alike() -> None:
    """By absolute error the 64 MiB would decide alone, and alpha would come out 100 times too large."""
    found = fit([*samples(1e-4, 1e9), Sample("all_reduce", 2, 64 << 20, 0.1)])
    assert found.alpha == pytest.approx(1e-4, rel=0.15)


def test_weights_decide_between_kinds_that_disagree() -> None:
    quick = [Sample("all_reduce", 2, n, 2e-4 + n / 2e9) for n in SIZES]
    slow = [Sample("all_gather", 2, n, 1e-4 + n / 2 / 5e8) for n in SIZES]
    heavy = [Sample(s.kind, s.ranks, s.nbytes, s.seconds, weight=100) for s in quick]
    assert fit([*heavy, *slow]).bandwidth == pytest.approx(2e9, rel=0.05)
    assert fit([*quick, *slow]).bandwidth < 1.5e9


def test_a_given_bandwidth_is_kept_and_alpha_fitted_beside_it() -> None:
    found = fit(samples(1e-4, 1e9), bandwidth=1e9)
    assert found.bandwidth == 1e9
    assert found.alpha == pytest.approx(1e-4)
    faster = fit(samples(1e-4, 1e9), bandwidth=4e9)
    assert faster.bandwidth == 4e9
    assert faster.alpha > 1e-4


def test_results_are_never_negative() -> None:
    falling = [Sample("broadcast", 2, n, 1.0 / n) for n in (1000, 2000, 4000)]
    found = fit(falling)
    assert found.alpha >= 0
    assert found.bandwidth == pytest.approx(4000 * 4000)  # what the last one reached
    steep = [Sample("broadcast", 2, n, 1e-9 * n * n) for n in (1000, 2000, 4000)]
    found = fit(steep)
    assert found.alpha == 0
    assert 2.5e5 < found.bandwidth < 1e6


def test_one_size_gives_bandwidth_alone() -> None:
    found = fit([Sample("broadcast", 2, 1000, 1e-3)] * 2)
    assert found.alpha == 0
    assert found.bandwidth == pytest.approx(1e6)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "0 cannot give a latency"),
        ([Sample("all_reduce", 2, 8, 1.0)], "1 cannot give a latency"),
        ([Sample("all_reduce", 2, 8, 0.0)] * 2, "positive"),
        ([Sample("all_reduce", 1, 8, 1.0)] * 2, "two ranks or more"),
        ([Sample("all_reduce", 2, 8, 1.0, weight=0.0)] * 2, "weight"),
        ([Sample("all_to_all", 2, 8, 1.0)] * 2, "kind='all_to_all' cannot be fitted: use one of all_reduce"),
    ],
)
def test_bad_samples(bad: list[Sample], message: str) -> None:
    with pytest.raises(ConfigValueError, match=message):
        fit(bad)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [("all_reduce", "ring"), ("all_gather", "ring"), ("reduce_scatter", "ring"), ("broadcast", "tree")],
)
def test_what_is_fitted_is_what_collectives_are_priced_by(kind: str, algorithm: str, ranks: int) -> None:
    device = Device(name="d", flops={"f32": 1.0}, memory_bandwidth=1.0, memory_bytes=1, op_overhead=0.0)
    level = Level(name="l", alpha=1e-4, bandwidth=1e9)
    cluster = ClusterSpec(name="c", device=device, levels=(level,), ranks=ranks)
    sample = Sample(kind, ranks, 1 << 20, 1.0)
    cost = collective_cost(kind, 1 << 20, range(ranks), cluster, algorithm)
    assert cost.seconds == pytest.approx(sample.messages * level.alpha + sample.wire_bytes / level.bandwidth)
