"""The engine against schedules worked out by hand."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commfuse_fx.cost.transfer import Transfer
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.simulate.engine import Engine
from tests.work import calls


def test_computing_alone_takes_its_time() -> None:
    engine = Engine()
    assert engine.run(2.0) == (0.0, 2.0)
    assert engine.run(0.5) == (2.0, 2.5)
    assert engine.now == 2.5


def test_a_transfer_runs_beside_compute_and_its_wait_is_free_when_it_is_done() -> None:
    engine = Engine()
    handle = engine.issue(Transfer("dp", 1.0, 2.0, links=("net",)))
    assert engine.now == 0.0
    assert engine.run(5.0) == (0.0, 5.0)
    assert engine.wait(handle) == (5.0, 5.0)
    assert engine.times(handle) == (0.0, 0.0, 3.0)


def test_a_wait_stands_still_until_the_end() -> None:
    engine = Engine()
    engine.run(1.0)
    handle = engine.issue(Transfer("dp", 1.0, 2.0))
    engine.run(0.5)
    assert engine.times(handle) == (1.0, 1.0, inf)
    assert engine.wait(handle) == (1.5, 4.0)
    assert engine.wait(handle) == (4.0, 4.0)


def test_one_stream_is_first_in_first_out() -> None:
    engine = Engine()
    first = engine.issue(Transfer("dp", 0.5, 3.5))
    engine.run(1.0)
    second = engine.issue(Transfer("dp", 0.0, 2.0))
    engine.run(1.0)
    assert engine.wait(second) == (2.0, 6.0), "the second waits for the first"
    assert engine.times(first) == (0.0, 0.0, 4.0)
    assert engine.times(second) == (1.0, 4.0, 6.0)


@given(
    st.lists(st.floats(0, 2), max_size=6),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 3), st.floats(0, 1)), max_size=3),
)
def test_running_each_of_several_parts_is_running_one_after_the_other(
    parts: list[float], transfers: list[tuple[float, float, float]]
) -> None:
    at_once, singly = Engine(), Engine()
    for engine in (at_once, singly):
        for latency, seconds, host in transfers:
            engine.issue(Transfer("dp", latency, seconds, host * seconds, ("net",)))
    at_once.run_each(parts)
    for part in parts:
        singly.run(part)
    assert at_once.now == singly.now
    assert at_once.drain() == singly.drain()


def test_waiting_for_the_first_leaves_the_second_on_the_wire() -> None:
    engine = Engine()
    first, second = engine.issue(Transfer("dp", 0.0, 3.0)), engine.issue(Transfer("dp", 0.0, 2.0))
    assert engine.wait(first) == (0.0, 3.0)
    engine.run(1.5)
    assert engine.wait(second) == (4.5, 5.0)


def test_streams_over_different_links_do_not_meet() -> None:
    engine = Engine()
    one = engine.issue(Transfer("dp", 0.0, 3.0, links=("net",)))
    other = engine.issue(Transfer("tp", 0.0, 2.0, links=("nvlink",)))
    engine.drain()
    assert engine.times(one)[2] == 3.0 and engine.times(other)[2] == 2.0


def test_a_shared_link_is_divided_evenly() -> None:
    engine = Engine()
    long = engine.issue(Transfer("dp", 0.0, 3.0, links=("nvlink", "net")))
    engine.run(1.0)
    short = engine.issue(Transfer("tp", 0.0, 1.0, links=("net",)))
    # Both at half speed from 1 to 3; then the long one has 1 second left.
    engine.drain()
    assert engine.times(short) == (1.0, 1.0, 3.0)
    assert engine.times(long) == (0.0, 0.0, 4.0)


def test_latency_does_not_load_the_link() -> None:
    engine = Engine()
    moving = engine.issue(Transfer("dp", 0.0, 2.0, links=("net",)))
    late = engine.issue(Transfer("tp", 2.0, 1.0, links=("net",)))
    engine.drain()
    assert engine.times(moving)[2] == 2.0 and engine.times(late)[2] == 3.0


def test_the_most_crowded_link_counts() -> None:
    engine = Engine()
    both = engine.issue(Transfer("a", 0.0, 1.0, links=("x", "y")))
    for stream in ("b", "c"):
        engine.issue(Transfer(stream, 0.0, 10.0, links=("y",)))
    alone = engine.issue(Transfer("d", 0.0, 10.0, links=("x",)))
    engine.wait(both)
    assert engine.now == pytest.approx(3.0), "a third of y, although half of x is free"
    assert engine.times(alone)[2] == inf


def test_a_transfer_takes_compute_time_away() -> None:
    engine = Engine()
    handle = engine.issue(Transfer("dp", 1.0, 4.0, host=1.0))
    # Until 1 nothing is lost; then three quarters of the core are left for 4 seconds, which do 3 seconds of work.
    assert engine.run(6.0) == (0.0, 7.0)
    assert engine.times(handle) == (0.0, 0.0, 5.0)


def test_step_and_backend_share_the_core_half_and_half() -> None:
    engine = Engine()
    handle = engine.issue(Transfer("dp", 0.0, 2.0, host=2.0))
    # Alone it would take the whole core; beside compute it gets half of it and moves at half speed.
    assert engine.run(1.0) == (0.0, 2.0)
    assert engine.wait(handle) == (2.0, 3.0), "one second of its two is left, at full speed"


def test_two_backends_together_get_half_of_the_core() -> None:
    engine = Engine()
    handles = [engine.issue(Transfer(stream, 0.0, 1.0, host=0.5)) for stream in ("dp", "tp")]
    free = engine.issue(Transfer("pp", 0.0, 1.0))
    engine.run(0.5)
    assert engine.now == 1.0
    assert engine.times(free)[2] == inf  # an event at the very end of a run is still to come
    assert engine.wait(free) == (1.0, 1.0)
    assert [engine.wait(handle)[1] for handle in handles] == [1.5, 1.5]


def test_an_idle_core_is_the_limit_of_a_backend() -> None:
    engine = Engine()
    handle = engine.issue(Transfer("dp", 0.0, 1.0, host=4.0))
    assert engine.wait(handle) == (0.0, 4.0)


def test_what_takes_no_time_ends_at_once() -> None:
    engine = Engine()
    first = engine.issue(Transfer("dp", 0.0, 1.0))
    nothing = engine.issue(Transfer("dp", 0.0, 0.0))
    last = engine.issue(Transfer("dp", 0.0, 1.0))
    alone = engine.issue(Transfer("tp", 0.0, 0.0))
    assert engine.wait(alone) == (0.0, 0.0)
    engine.drain()
    assert engine.times(first)[2] == engine.times(nothing)[1] == engine.times(nothing)[2] == 1.0
    assert engine.times(last) == (0.0, 1.0, 2.0)


def test_latency_only() -> None:
    engine = Engine()
    handle = engine.issue(Transfer("dp", 0.25, 0.0))
    assert engine.wait(handle) == (0.0, 0.25)


def test_drain_and_outstanding() -> None:
    engine = Engine()
    engine.issue(Transfer("dp", 1.0, 1.0))
    engine.issue(Transfer("dp", 0.5, 2.0))
    engine.issue(Transfer("tp", 0.0, 1.0))
    assert engine.outstanding() == {"dp": 4.5, "tp": 1.0}
    engine.run(1.5)
    assert engine.outstanding() == {"dp": 3.0}
    assert engine.drain() == 4.5
    assert engine.outstanding() == {}


@pytest.mark.parametrize(
    "bad", [{"latency": -1.0}, {"transfer": inf}, {"host": float("nan")}, {"transfer": 0.0, "host": 1.0}]
)
def test_impossible_transfers_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigValueError, match=r"Transfer \w+="):
        Transfer(**{"stream": "dp", "latency": 0.0, "transfer": 1.0, **bad})  # type: ignore[arg-type]


times = st.floats(0.0, 10.0).map(lambda value: round(value, 3))
transfers = st.builds(
    lambda stream, latency, transfer, host, links: Transfer(stream, latency, transfer, host if transfer else 0, links),
    st.sampled_from(["dp", "tp", "pp"]),
    times,
    times,
    st.sampled_from([0.0, 0.1, 1.0, 5.0]),
    st.lists(st.sampled_from(["x", "y"]), max_size=2, unique=True).map(tuple),
)


@given(st.lists(st.one_of(times, transfers, st.integers(0, 5)), max_size=20))
def test_nothing_is_lost_and_nothing_is_free(script: list[float | Transfer | int]) -> None:
    """Numbers compute, transfers are issued, integers wait for an earlier transfer."""
    engine = Engine()
    sent: list[Transfer] = []
    computed = 0.0
    for item in script:
        before = engine.now
        if isinstance(item, Transfer):
            assert engine.issue(item) == len(sent)
            sent.append(item)
            assert engine.now == before
        elif isinstance(item, int):
            if item < len(sent):
                entered, left = engine.wait(item)
                assert entered == before and left == engine.now >= entered
                assert engine.times(item)[2] <= left
        else:
            computed += item
            begin, end = engine.run(item)
            assert begin == before and end >= begin + item - 1e-9
    end = engine.drain() + 1e-6
    assert end >= computed + sum(each.host for each in sent), "one core does all of it"
    for link in ("x", "y"):
        assert end >= sum(each.transfer for each in sent if link in each.links)
    for stream in ("dp", "tp", "pp"):
        reached = 0.0
        for handle, each in enumerate(sent):
            if each.stream == stream:
                issued, begin, done = engine.times(handle)
                assert begin >= max(issued, reached)
                assert done >= begin + each.latency + each.transfer - 1e-6
                reached = done


def test_work_grows_with_what_is_played() -> None:
    busy = Transfer("dp", 1e-5, 1.0, host=0.1, links=("net",))

    def play(nodes: int) -> None:
        engine = Engine()
        for number in range(nodes):
            if number % 100 == 0:
                engine.issue(busy)
            engine.run(1e-5)
        engine.drain()
        # All hosts' work and all computing fit beside the wire, which is the bottleneck.
        assert engine.now == pytest.approx(nodes / 100 * (1.0 + 1e-5))

    assert calls(lambda: play(40_000)) < 4.4 * calls(lambda: play(10_000))


def test_rest_stands_still_until_a_time_and_transfers_go_on() -> None:
    engine = Engine()
    handle = engine.issue(Transfer("dp", 0.0, 2.0, host=1.0))
    engine.run(0.25)  # takes twice as long: the transfer has the other half of the core
    engine.rest(1.5)
    assert (engine.now, engine.times(handle)[2]) == (1.5, inf)
    engine.rest(1.0)
    assert engine.now == 1.5
    engine.rest(5.0)
    assert (engine.now, engine.times(handle)[2]) == (5.0, 2.0)
