"""Latencies that are longer while the step computes: threads of the backend wait for its core."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

import commfuse_fx as cf
from commfuse_fx.cost.collective_cost import collective_cost
from commfuse_fx.cost.model import CostModel
from commfuse_fx.cost.transfer import Transfer
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.simulate.engine import Engine
from tests.cost.graphs import CORE

SLOW = Transfer("dp", 1.0, 2.0, slowed=4.0, last=0.5)
"""Two messages, one half of it each. Beside compute threads wait 1.5 for the core with each: three latencies."""


def test_threads_wait_for_the_core_while_the_step_computes() -> None:
    engine = Engine()
    handle = engine.issue(SLOW)
    engine.run(10.0)
    # Its latency until 1, then it moves until 3, beside the wait of the first message; then that of the last one.
    assert engine.times(handle) == (0.0, 0.0, 4.5)


def test_what_is_sent_moves_while_they_wait() -> None:
    engine = Engine()
    handles = [engine.issue(Transfer(name, 1.0, 6.0, slowed=4.0, last=0.5, links=(name,))) for name in ("dp", "tp")]
    short = engine.issue(Transfer("pp", 1.0, 0.5, slowed=4.0, last=0.5))
    nothing = engine.issue(Transfer("ep", 1.0, 0.0, slowed=4.0, last=0.5))
    engine.run(10.0)
    assert [engine.times(handle)[2] for handle in handles] == [8.5, 8.5]
    assert [engine.times(handle)[2] for handle in (short, nothing)] == [4.0, 4.0]
    assert [engine.moving(handle)[1:] for handle in (*handles, short)] == [(1.0, 7.0), (1.0, 7.0), (1.0, 1.5)]


def test_and_as_ever_while_it_waits() -> None:
    engine = Engine()
    assert engine.wait(engine.issue(SLOW)) == (0.0, 3.0)


def test_what_has_passed_while_computing_counts() -> None:
    engine = Engine()
    handles = [engine.issue(Transfer(name, 1.0, 0.0, slowed=4.0, last=1.0)) for name in ("dp", "tp")]
    engine.run(2.0)  # a second of latency, and one of three of the wait
    assert engine.wait(engine.issue(Transfer("pp", 0.0, 0.0))) == (2.0, 2.0), "no time to stand still"
    engine.run(2.0)
    assert [engine.times(handle)[2] for handle in handles] == [inf, inf], "an event at the very end is still to come"
    assert [engine.wait(handle) for handle in handles] == [(4.0, 4.0)] * 2


def test_they_have_the_core_as_soon_as_the_step_stands_still() -> None:
    engine = Engine()
    handle = engine.issue(SLOW)
    engine.run(3.5)
    assert engine.wait(handle) == (3.5, 3.5)
    one, other = engine.issue(SLOW), engine.issue(Transfer("tp", 0.5, 0.0))
    assert engine.wait(other) == (3.5, 4.0)
    engine.run(10.0)
    assert engine.times(one)[2] == 3.5 + 4.5, "its latency was not over then"


def test_nothing_before_its_issue_counts() -> None:
    engine = Engine()
    engine.wait(engine.issue(SLOW))
    engine.run(0.5)  # with nothing on the wire
    handle = engine.issue(SLOW)
    assert engine.wait(handle) == (3.5, 6.5)
    assert engine.times(handle) == (3.5, 3.5, 6.5)


def test_two_at_a_time_share_their_stream() -> None:
    engine = Engine()
    handles = [engine.issue(SLOW) for _ in range(3)]
    engine.run(16.5)
    # Two move from 1 on, and take twice as long together. The third one begins when they have ended.
    assert [engine.times(handle) for handle in handles] == [(0.0, 0.0, 6.5), (0.0, 0.0, 6.5), (0.0, 6.5, 11.0)]


def test_one_waits_while_the_other_moves() -> None:
    engine = Engine()
    first = engine.issue(SLOW)
    engine.run(2.0)
    second = engine.issue(SLOW)
    engine.run(8.0)
    assert engine.times(first) == (0.0, 0.0, 4.5)
    assert engine.times(second) == (2.0, 2.0, 6.5)


def test_and_a_short_one_passes_a_long_one() -> None:
    engine = Engine()
    long = engine.issue(Transfer("dp", 0.0, 9.0, slowed=4.0))
    engine.run(1.0)
    short = engine.issue(Transfer("dp", 0.0, 2.0, slowed=4.0))
    engine.run(12.0)
    assert (engine.times(long)[2], engine.times(short)[2]) == (11.0, 5.0)


def test_what_takes_no_time_ends_at_once() -> None:
    engine = Engine()
    first = engine.issue(SLOW)
    second = engine.issue(Transfer("dp", 0.5, 0.0, slowed=4.0))
    third = engine.issue(Transfer("dp", 0.0, 0.0, slowed=4.0))
    engine.run(20.0)
    # The third one begins when the second one has made room.
    assert [engine.times(handle)[2] for handle in (first, second, third)] == [4.5, 2.0, 2.0]


def test_two_that_the_core_holds_back_move_no_more_than_one() -> None:
    engine = Engine()
    handles = [engine.issue(Transfer("dp", 0.0, 2.0, slowed=4.0, busy_speed=0.5)) for _ in range(2)]
    engine.run(10.0)
    assert [engine.times(handle)[2] for handle in handles] == [8.0, 8.0]


def test_outstanding_counts_what_is_left_of_both() -> None:
    engine = Engine()
    engine.issue(SLOW)
    engine.issue(SLOW)
    engine.run(0.5)
    assert engine.outstanding() == {"dp": 2 * (0.5 + 2.0 + 1.5 + 1.5)}
    engine.run(1.5)
    assert engine.outstanding() == {"dp": 2 * (1.5 + 0.5 + 1.5)}


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.floats(0, 5), st.floats(0, 2), st.booleans(), st.sampled_from(["dp", "tp"])),
        min_size=1,
        max_size=12,
    ),
    st.floats(1.01, 50),
)
def test_streams_begin_in_order_two_at_a_time_and_all_ends(
    acts: list[tuple[float, float, float, bool, str]], slowed: float
) -> None:
    engine = Engine()
    handles: dict[str, list[int]] = {}
    for compute, seconds, latency, waits, stream in acts:
        engine.run(compute)
        price = Transfer(stream, latency, seconds, 0.2 * seconds, ("net",), slowed=slowed, last=latency / 2)
        handle = engine.issue(price)
        handles.setdefault(stream, []).append(handle)
        if waits:
            engine.wait(handle)
    engine.drain()
    for row in handles.values():
        times = [engine.times(handle) for handle in row]
        assert all(issued <= begin <= end < inf for issued, begin, end in times)
        assert all(one[1] <= other[1] for one, other in pairwise(times))
        for place, (_, begin, _) in enumerate(times):
            assert sum(1 for _, _, end in times[:place] if end > begin) <= 1
    assert engine.outstanding() == {}


def test_a_level_that_computing_slows_is_priced_and_saved() -> None:
    level = cf.Level(name="tcp", alpha=1e-4, bandwidth=1e9, alpha_busy=5e-3)
    cluster = cf.ClusterSpec(name="shared cores", device=CORE, levels=(level,), ranks=2)
    assert collective_cost("all_reduce", 4e6, (0, 1), cluster).slowed == pytest.approx(50.0)
    assert cf.ClusterSpec.from_json(cluster.to_json()) == cluster
    assert CostModel(cluster).cluster.levels[0].alpha_busy == 5e-3
    plain = cf.ClusterSpec(name="own cores", device=CORE, levels=(cf.Level(name="tcp", alpha=1e-4, bandwidth=1e9),))
    assert collective_cost("all_reduce", 4e6, (0, 1), plain).slowed == 1.0
    assert "alpha_busy" not in plain.to_json()


def test_bad_figures_are_refused() -> None:
    level = cf.Level(name="tcp", alpha=1e-4, bandwidth=1e9, alpha_busy=5e-5)
    with pytest.raises(ConfigValueError, match="alpha_busy is 5e-05, below alpha 0.0001"):
        cf.ClusterSpec(name="odd", device=CORE, levels=(level,))
    with pytest.raises(ConfigValueError, match="slowed=0.5: give a factor"):
        Transfer("dp", 1.0, 1.0, slowed=0.5)
    with pytest.raises(ConfigValueError, match="last=2.0: a part of its latency=1.0"):
        Transfer("dp", 1.0, 1.0, slowed=2.0, last=2.0)
    with pytest.raises(ConfigValueError, match="last=-1.0: give seconds"):
        Transfer("dp", 1.0, 1.0, slowed=2.0, last=-1.0)


def test_a_latency_of_nothing_cannot_be_slowed() -> None:
    level = cf.Level(name="tcp", alpha=0, bandwidth=1e9, alpha_busy=1e-3)
    with pytest.raises(ConfigValueError, match=r"levels\[0\].alpha_busy is 0.001 with alpha 0; give alpha too"):
        cf.ClusterSpec(name="c", device=CORE, levels=(level,))


def test_a_group_over_several_levels_waits_for_its_core_as_on_the_slowest() -> None:
    host = cf.Level(name="host", domains=2, alpha=1e-7, bandwidth=1e9, alpha_busy=2e-3)
    tcp = cf.Level(name="tcp", alpha=1e-3, bandwidth=1e9)
    cluster = cf.ClusterSpec(name="hosts", device=CORE, levels=(host, tcp), ranks=4)
    inside, over = (collective_cost("all_reduce", 4, ranks, cluster) for ranks in ((0, 1), range(4)))
    assert inside.slowed * inside.latency == pytest.approx(2 * 2e-3)
    assert over.slowed == pytest.approx(2.0)
    assert (inside.last, over.last) == (1e-7, 1e-3)
