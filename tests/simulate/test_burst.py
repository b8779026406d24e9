"""Networks that carry some bytes at once after a pause: how they are priced, played and found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

import commfuse_fx as cf
from commfuse_fx.cost.collective_cost import collective_cost
from commfuse_fx.cost.model import CostModel
from commfuse_fx.cost.transfer import Transfer
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.measure.fit_alpha_beta import Burst, Sample, burst
from commfuse_fx.simulate.engine import Engine
from commfuse_fx.simulate.rounds import play
from commfuse_fx.simulate.simulation import simulate
from tests.cost.graphs import Graph, Priced

BUCKET, PEAK, RATE = 1e6, 1e9, 1.25e8


def moved(seconds: float, burst: float = 4.0, boost: float = 5.0, host: float = 0.0) -> Transfer:
    return Transfer("dp", 0.0, seconds, host * seconds, ("net",), burst, boost)


def test_a_transfer_is_fast_until_the_allowance_is_spent() -> None:
    engine = Engine()
    handle = engine.issue(moved(10.0))  # 1 s at 5 times the rate spends 4 s of allowance; 5 s are left
    assert engine.wait(handle)[1] == pytest.approx(6.0)
    assert engine.allowances() == {"allowance of net": 0.0}


def test_one_that_ends_before_is_fast_all_the_way() -> None:
    engine = Engine()
    assert engine.wait(engine.issue(moved(2.5)))[1] == pytest.approx(0.5)
    assert engine.allowances()["allowance of net"] == pytest.approx(2.0)


def test_a_pause_earns_the_allowance_back_and_no_more() -> None:
    for pause, earned in ((1.5, 1.5), (100.0, 4.0)):
        engine = Engine()
        engine.wait(engine.issue(moved(10.0)))
        engine.run(pause)
        begin = engine.now
        assert engine.wait(engine.issue(moved(10.0)))[1] - begin == pytest.approx(10.0 - earned)


def test_a_link_that_is_held_back_by_the_core_spends_less() -> None:
    engine = Engine()
    engine.issue(moved(10.0, host=0.25))  # at 5 times the rate it would take all of the core; it gets a half
    engine.run(1.0)
    assert engine.allowances()["allowance of net"] == pytest.approx(4.0 - (2.5 - 1.0) * 2.0)


def test_a_burst_keeps_the_core_no_longer_busy_than_it_takes() -> None:
    transfer = moved(2.5, host=0.25)
    assert transfer.least_host == 0.5  # of 0.625 at the rate
    engine = Engine()
    engine.issue(transfer)
    assert engine.run(1.0)[1] == pytest.approx(1.5)
    engine = Engine()
    engine.issue(moved(2.5, host=0.1))
    assert engine.run(1.0)[1] == pytest.approx(1.25)


def test_two_streams_spend_one_allowance() -> None:
    engine = Engine()
    for stream in ("dp", "tp"):
        engine.issue(Transfer(stream, 0.0, 5.0, 0.0, ("net",), 4.0, 5.0))
    assert engine.drain() == pytest.approx(6.0)  # as one of 10 s


def test_without_bursts_nothing_is_kept() -> None:
    engine = Engine()
    engine.issue(Transfer("dp", 0.0, 1.0, links=("net",)))
    assert engine.allowances() == {}


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 5), st.floats(0, 2), st.booleans()), min_size=1, max_size=12),
    st.floats(0.01, 10),
    st.floats(1, 50),
)
def test_no_burst_takes_longer_and_none_carries_more_than_rate_and_bucket(
    acts: list[tuple[float, float, float, bool]], most: float, boost: float
) -> None:
    ends = []
    for allowed, factor in ((0.0, 1.0), (most, boost)):
        engine = Engine()
        for compute, seconds, latency, waits in acts:
            engine.run(compute)
            handle = engine.issue(Transfer("dp", latency, seconds, 0.2 * seconds, ("net",), allowed, factor))
            if waits:
                engine.wait(handle)
        ends.append(engine.drain())
    plain, bursts = ends
    assert bursts <= plain * (1 + 1e-9) + 1e-7
    assert sum(seconds for _, seconds, _, _ in acts) <= bursts + most + 1e-6


def test_transfers_say_what_is_wrong() -> None:
    with pytest.raises(ConfigValueError, match="boost=0.5: give a factor"):
        Transfer("dp", 0.0, 1.0, burst=1.0, boost=0.5)
    with pytest.raises(ConfigValueError, match="burst=-1.0"):
        Transfer("dp", 0.0, 1.0, burst=-1.0)


def test_steps_are_played_until_the_allowance_is_as_before() -> None:
    """Compute, then 4 s on the wire with nothing to hide it."""
    for compute, period in ((3.0, 5.0), (1.0, 4.0), (0.25, 4.0)):
        g = Graph()
        a = g.op("a", g.input("x"))
        program = g.program(g.op("loss", g.wait(g.start("reduce", a))))
        priced = Priced(computes={"a": compute}, moves={"reduce": moved(4.0, burst=2.0, boost=5.0)})
        played = play(program, priced, steps=1)
        # 2 s of allowance last for half a second and 2.5 s of transfer; the rest takes 1.5 s.
        assert played.ended - played.began == pytest.approx(compute + 2.0)
        # Only as much as compute gives time for is earned back: no step is shorter than its bytes at the rate.
        settled = simulate(program, priced)
        assert settled.step_seconds == pytest.approx(period)
        assert settled.bound_seconds <= settled.step_seconds * (1 + 1e-9)


def cluster(**burst_fields: float) -> cf.ClusterSpec:
    device = cf.Device(name="cpu", flops={"f32": 1e11}, memory_bandwidth=1e10, memory_bytes=2**34, op_overhead=1e-6)
    level = cf.Level(name="tcp", alpha=1e-4, bandwidth=RATE, **burst_fields)
    return cf.ClusterSpec(name="limited", device=device, levels=(level,), ranks=2)


def test_a_level_with_bursts_is_priced_and_saved() -> None:
    limited = cluster(burst_bytes=BUCKET, burst_bandwidth=PEAK)
    cost = collective_cost("all_reduce", 4e6, (0, 1), limited)
    assert (cost.burst, cost.boost) == (BUCKET / RATE, PEAK / RATE)
    assert cost.seconds == collective_cost("all_reduce", 4e6, (0, 1), cluster()).seconds, "the time without"
    assert cf.ClusterSpec.from_json(limited.to_json()) == limited
    assert "burst" not in cluster().to_json(), "documents and digests of others stay as they were"
    assert CostModel(limited).cluster.levels[0].burst_bytes == BUCKET


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"burst_bytes": 1e6}, "burst_bandwidth is 0.0 with burst_bytes 1000000.0"),
        ({"burst_bandwidth": 1e9}, "give both 0"),
        ({"burst_bytes": 1e6, "burst_bandwidth": 1e6}, "a speed that is not below the bandwidth"),
        ({"burst_bytes": -1.0, "burst_bandwidth": 1e9}, "burst_bytes"),
    ],
)
def test_bad_bursts_are_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigValueError, match=message):
        cluster(**fields)


def rested(seconds_of_bytes: Callable[[float], float]) -> list[Sample]:
    sizes = [(4 << 20) >> shift for shift in (6, 4, 2, 0)]
    return [Sample("all_reduce", 2, nbytes, seconds_of_bytes(nbytes)) for nbytes in sizes]


def test_a_token_bucket_is_found() -> None:
    def seconds(nbytes: float) -> float:
        fast = min(nbytes, BUCKET * PEAK / (PEAK - RATE))
        return fast / PEAK + (nbytes - fast) / RATE

    found = burst(rested(seconds), RATE)
    assert found.nbytes == pytest.approx(BUCKET) and found.bandwidth == pytest.approx(PEAK)
    found = burst(rested(lambda nbytes: 2 * 5e-4 + seconds(nbytes)), RATE, alpha=5e-4)  # two messages in a ring of two
    assert found.nbytes == pytest.approx(BUCKET)


def test_neither_a_plain_link_nor_one_that_is_faster_alone_has_a_bucket() -> None:
    assert burst(rested(lambda nbytes: 1e-4 + nbytes / RATE), RATE) == Burst()
    assert burst(rested(lambda nbytes: 4e-4 + nbytes / (2 * PEAK)), PEAK) == Burst()
