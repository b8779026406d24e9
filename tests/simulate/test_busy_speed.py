"""Transfers that are slower while the step computes: the backend's threads get the core in turn with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import commfuse_fx as cf
from commfuse_fx.cost.collective_cost import collective_cost
from commfuse_fx.cost.model import CostModel
from commfuse_fx.cost.transfer import Transfer
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.simulate.engine import Engine
from tests.cost.graphs import CORE, Graph, f32

HALF = Transfer("dp", 1.0, 2.0, busy_speed=0.5)


def test_a_transfer_is_slow_while_the_step_computes_and_its_latency_is_not() -> None:
    engine = Engine()
    handle = engine.issue(HALF)
    engine.run(10.0)
    assert engine.times(handle) == (0.0, 0.0, 5.0)


def test_and_as_ever_while_it_waits() -> None:
    engine = Engine()
    handle = engine.issue(HALF)
    engine.run(3.0)  # half of it has moved
    assert engine.wait(handle) == (3.0, 4.0)


def test_it_takes_less_of_the_core_by_the_second() -> None:
    engine = Engine()
    engine.issue(Transfer("dp", 0.0, 2.0, host=0.8, busy_speed=0.5))
    assert engine.run(3.2) == (0.0, 4.0)  # 0.2 of the core for 4 s


def test_a_burst_does_not_help_it() -> None:
    engine = Engine()
    handle = engine.issue(Transfer("dp", 0.0, 2.0, links=("net",), burst=2.0, boost=4.0, busy_speed=0.5))
    engine.run(2.0)
    assert engine.wait(handle) == (2.0, 2.25)  # one second of transfer is left, and the whole allowance


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.booleans()), min_size=1, max_size=12), st.floats(0.1, 1))
def test_it_only_makes_steps_longer(acts: list[tuple[float, float, bool]], busy_speed: float) -> None:
    ends = []
    for speed in (1.0, busy_speed):
        engine = Engine()
        for compute, seconds, waits in acts:
            engine.run(compute)
            handle = engine.issue(Transfer("dp", 0.1, seconds, 0.2 * seconds, busy_speed=speed))
            if waits:
                engine.wait(handle)
        ends.append(engine.drain())
    assert ends[0] <= ends[1] + 1e-9


def test_a_level_that_computing_slows_is_priced_and_saved() -> None:
    level = cf.Level(name="tcp", alpha=1e-4, bandwidth=1e9, bandwidth_busy=2.5e8)
    cluster = cf.ClusterSpec(name="shared cores", device=CORE, levels=(level,), ranks=2)
    assert collective_cost("all_reduce", 4e6, (0, 1), cluster).busy_speed == pytest.approx(0.25)
    assert cf.ClusterSpec.from_json(cluster.to_json()) == cluster
    graph = Graph()
    start = graph.start("sum", graph.input("gradient", f32(1 << 20)))
    assert CostModel(cluster).transfer_of(start, mesh=Mesh((2,), ("dp",))).busy_speed == pytest.approx(0.25)
    plain = cf.ClusterSpec(name="own cores", device=CORE, levels=(cf.Level(name="tcp", alpha=1e-4, bandwidth=1e9),))
    assert collective_cost("all_reduce", 4e6, (0, 1), plain).busy_speed == 1.0
    assert "bandwidth_busy" not in plain.to_json()


def test_bad_figures_are_refused() -> None:
    level = cf.Level(name="tcp", alpha=1e-4, bandwidth=1e9, bandwidth_busy=2e9)
    with pytest.raises(ConfigValueError, match="bandwidth_busy is 2000000000.0, above bandwidth 1000000000.0"):
        cf.ClusterSpec(name="odd", device=CORE, levels=(level,))
    for busy_speed in (0.0, 1.5):
        with pytest.raises(ConfigValueError, match=f"busy_speed={busy_speed}: give a part above 0, at most 1"):
            Transfer("dp", 1.0, 1.0, busy_speed=busy_speed)
