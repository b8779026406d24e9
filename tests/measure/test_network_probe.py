"""What calibrating finds out about a network that is known, by a clock of the test's own: also in too little time, and
where latency is long."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from commfuse_fx.commands import calibrate as command
from commfuse_fx.cost.collective_cost import collective_cost
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.measure import network_probe, probe_group
from commfuse_fx.measure.calibration import Calibration, _Planned, _report_level, _spec_of
from commfuse_fx.measure.calibration_report import CalibrationReport, LevelReport
from commfuse_fx.measure.contention_probe import Contention
from commfuse_fx.measure.fit_alpha_beta import Sample
from commfuse_fx.measure.network_probe import PIPELINED_BYTES, NetworkFigures, measure_group
from commfuse_fx.measure.probe_group import Group
from tests.cost.graphs import CLUSTER, CORE

RANKS = (0, 1)


class _Network(Group):
    """Two ranks, one collective on the wire at a time."""

    def __init__(self, alpha: float, bandwidth: float) -> None:
        super().__init__(None, RANKS, torch.device("cpu"))
        self.alpha, self.bandwidth = alpha, bandwidth
        self.now = 0.0

    def agreed(self, seconds: float) -> float:
        return seconds

    def collective(self, kind: str, nbytes: int) -> tuple[int, int, Callable[[], Any]]:
        return nbytes, 1, lambda: self._send(kind, nbytes)

    def all_reduce(self, x: torch.Tensor) -> Any:
        self._send("all_reduce", x.numel() * 4)
        return argparse.Namespace(wait=lambda: None)

    def _send(self, kind: str, nbytes: int) -> None:
        sample = Sample(kind, self.size, nbytes, 1.0)
        self.now += sample.messages * self.alpha + sample.wire_bytes / self.bandwidth


def measured(
    monkeypatch: pytest.MonkeyPatch, network: _Network, seconds: float, contention: Contention | None = None
) -> tuple[NetworkFigures, LevelReport]:
    def rest(seconds: float) -> None:
        network.now += seconds

    for module in (network_probe, probe_group):
        monkeypatch.setattr(module, "perf_counter", lambda: network.now)
    monkeypatch.setattr(network_probe, "sleep", rest)
    monkeypatch.setattr(network_probe, "shown", lambda what: nullcontext())
    monkeypatch.setattr(network_probe, "measure_contention", lambda *args: contention)
    found = measure_group(network, "host", seconds)
    return found, _report_level("host", (RANKS,), [found, found])


@pytest.mark.parametrize("seconds", [0.01, 0.5, 15.0])
@pytest.mark.parametrize(("alpha", "bandwidth"), [(1.5e-4, 1.5e9), (2e-5, 1.2e10), (1e-3, 1e8), (5e-4, 2e6)])
def test_bandwidth_does_not_depend_on_the_time_there_is(
    monkeypatch: pytest.MonkeyPatch, alpha: float, bandwidth: float, seconds: float
) -> None:
    _, level = measured(monkeypatch, _Network(alpha, bandwidth), seconds)
    assert level.bandwidth == pytest.approx(bandwidth, rel=0.2)
    assert level.alpha == pytest.approx(alpha, rel=0.2)


def test_rows_are_as_large_as_ever_where_the_ladder_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    found, level = measured(monkeypatch, _Network(1.5e-4, 1.5e9), 0.01)
    assert found.pipelined is not None and found.pipelined.nbytes == PIPELINED_BYTES
    *ladder, last = found.samples
    assert max(sample.nbytes for sample in ladder) < PIPELINED_BYTES
    assert (last.kind, last.nbytes) == ("all_reduce", PIPELINED_BYTES)
    assert level.samples == found.samples


def test_and_smaller_where_one_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = measured(monkeypatch, _Network(5e-4, 2e6), 15.0)
    assert found.pipelined is not None and found.pipelined.nbytes < PIPELINED_BYTES
    assert max(sample.seconds for sample in found.samples) < network_probe.SLOW


def test_latency_is_not_taken_for_a_lack_of_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 4 MiB is mostly latency here."""
    _, level = measured(monkeypatch, _Network(2e-2, 1e9), 15.0)
    assert level.bandwidth == pytest.approx(1e9, rel=0.05)


def test_a_latency_that_compute_slows_counts_where_there_is_none_without(monkeypatch: pytest.MonkeyPatch) -> None:
    network = _Network(0.0, 1e9)
    contention = Contention(per_byte=0.0, per_message=0.0, latency=1e-3, bandwidth=1e9)
    _, level = measured(monkeypatch, network, 15.0, contention)
    assert 0 < level.alpha <= 1e-6
    spec = _spec_of(_Planned("host", None, (RANKS,)), level, "")
    cluster = ClusterSpec(name="gloo-2", device=CORE, levels=(spec,), ranks=2)
    cost = collective_cost("all_reduce", 4, RANKS, cluster)
    assert cost.latency * cost.slowed == pytest.approx(2e-3)


# Figures that are not to be relied on.


def report(level: LevelReport) -> CalibrationReport:
    return CalibrationReport(2, "gloo", "2.13.0", 1.0, CORE, (level,))


def printed(level: LevelReport, capsys: pytest.CaptureFixture[str], json: bool) -> tuple[str, str]:
    options = argparse.Namespace(json=json, out="mine.json")
    command._print_report(Calibration(CLUSTER, report(level)), options)
    found = capsys.readouterr()
    return found.out, found.err


def test_a_fit_that_is_far_off_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, measured_level = measured(monkeypatch, _Network(1e-4, 1e9), 0.5)
    level = replace(measured_level, kind_errors={"all_reduce": 0.7, "broadcast": 0.9})
    (warning,) = report(level).warnings
    assert warning.startswith("level host: the median error of all_reduce is 70%, ")
    assert warning.endswith("calibrate again with nothing else running, and more --seconds")
    assert report(level).to_dict()["warnings"] == [warning]
    assert report(level).text().endswith(f"\nwarning: {warning}\n")
    for json in (False, True):
        out, err = printed(level, capsys, json)
        assert warning in out
        assert err == f"commfuse: warning: {warning}\n"


def test_a_fit_that_is_not_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _, measured_level = measured(monkeypatch, _Network(1e-4, 1e9), 0.5)
    level = replace(measured_level, kind_errors={"all_reduce": 0.3, "broadcast": 0.9})
    assert report(level).warnings == ()
    assert report(level).to_dict()["warnings"] == []
    out, err = printed(level, capsys, json=False)
    assert "warning" not in out and err == ""
