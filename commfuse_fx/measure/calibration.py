"""Measure the running ranks: what a collective costs on each level of their network, and how fast a rank computes.

Every rank takes part. Whatever decides how often something is measured is agreed between the ranks that
measure it, so that none is left alone in a collective. The result is rank 0's, sent to all.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.machine.cluster_parts import Device, Level
from commfuse_fx.measure.calibration_report import CalibrationReport, LevelReport
from commfuse_fx.measure.fit_alpha_beta import Fit, Sample, burst, fit
from commfuse_fx.measure.network_probe import NetworkFigures, measure_group, shown
from commfuse_fx.measure.probe import probe, slowest_figures
from commfuse_fx.measure.probe_group import Group, Heed
from commfuse_fx.runtime.execute.wire.socket_threads import let_lock_holders_run
from commfuse_fx.runtime.ranks.joining.world import world_timeout
from commfuse_fx.support.objects import gather_objects
from commfuse_fx.support.ranks import is_distributed

DEFAULT_SECONDS = 15.0

LEAST_ALPHA = 1e-7
"""Seconds that a message takes at least: no network is faster, and where bytes explain all that was measured, a fit may
give 0."""

LEAST_SLOWED = 2.0
"""How many times its latency a message must take beside compute for that to be a figure of its own."""

MOST_HELD_BACK = 0.95
"""The part of the bandwidth that is left beside compute, at most, for that to be a figure of its own."""


MOST_LATENCY = 0.5
"""The part of a row of collectives that may be latency where its bytes per second are a bandwidth."""


@dataclass(frozen=True)
class Calibration:
    """A calibration is what `calibrate` has measured. It is the same on every rank.

    cluster: the cluster as measured, which `compile` takes as `cluster=`.
    report: how it was found, and how far it is to be relied on.
    """

    cluster: ClusterSpec
    report: CalibrationReport


def calibrate(seconds: float = DEFAULT_SECONDS, device: str | torch.device | None = None) -> Calibration:
    """Measure network and devices of the running world. All ranks call it, with the same arguments.

    seconds: roughly how long measuring may take; slow networks take longer.
    device: what the collectives and the compute run on. None: CUDA where there is a GPU, else the CPU.

    Returns the same on every rank. Raises ConfigTypeError or ConfigValueError for bad arguments, or a world of
    fewer than two ranks.
    """
    budget, where = _check_seconds(seconds), _check_device(device)
    if not is_distributed() or dist.get_world_size() < 2:
        raise ConfigValueError(
            "calibrate() measures the network between ranks: start at least two with torchrun, and call "
            "commfuse_fx.init() first"
        )
    began = perf_counter()
    with torch.no_grad():
        device_share = 0.3 * budget
        network = measure_network(where, budget - device_share)
        with shown("measuring the device"):
            gather_objects(None)  # start together
            figures = slowest_figures(gather_objects(probe(where, device_share)))
    source = _source(where, "commfuse calibrate")
    measured = Device(source=source, **figures, collective_overhead=network.overhead)
    world, levels = dist.get_world_size(), tuple(level for _, level in network.levels)
    report = CalibrationReport(world, _backend(where), torch.__version__, perf_counter() - began, measured, levels)
    return _of_rank_0(Calibration(network.cluster(measured, where, source), report))


def measured_cluster(device: torch.device, seconds: float, figures: Device, heed: Heed | None = None) -> ClusterSpec:
    """The network of the running world as measured in about so many seconds, with these figures of a device.

    heed: as `Group` takes it. All ranks call it. The result is the same on every rank.
    """
    with torch.no_grad():
        network = measure_network(device, seconds, heed)
    source = _source(device, "a compiled step")
    return _of_rank_0(network.cluster(replace(figures, collective_overhead=network.overhead), device, source))


@dataclass(frozen=True)
class Network:
    """What was measured of each level of the network, the innermost first."""

    levels: tuple[tuple[_Planned, LevelReport], ...]

    @property
    def overhead(self) -> float:
        """Seconds of compute that a collective takes away besides its bytes."""
        return max(level.overhead for _, level in self.levels)

    def cluster(self, device: Device, where: torch.device, source: str) -> ClusterSpec:
        world = dist.get_world_size()
        levels = tuple(_spec_of(*pair, source) for pair in self.levels)
        return ClusterSpec(name=f"{_backend(where)}-{world}", device=device, levels=levels, ranks=world)


def measure_network(device: torch.device, seconds: float, heed: Heed | None = None) -> Network:
    """Measure each level of the network, all in about so many seconds. All ranks call it."""
    plan = _levels_of(_hosts())
    return Network(tuple((planned, _measure_level(planned, device, seconds / len(plan), heed)) for planned in plan))


def _backend(device: torch.device) -> str:
    world: Any = dist.group.WORLD
    return str(world._get_backend(device).name())


def _source(device: torch.device, measurer: str) -> str:
    return f"measured by {measurer}: {dist.get_world_size()} ranks, {_backend(device)}, torch {torch.__version__}"


Found = TypeVar("Found")


def _of_rank_0(mine: Found) -> Found:
    """What rank 0 has, on all ranks."""
    result: Found = gather_objects(mine)[0]
    return result


def _check_seconds(seconds: float) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise ConfigTypeError(f"seconds={seconds!r} must be a number of seconds")
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigValueError(f"seconds={seconds!r} must be positive; {DEFAULT_SECONDS:g} is a good value")
    return float(seconds)


def _check_device(device: str | torch.device | None) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if device is None:
        device = "cuda" if has_cuda else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigValueError(f"device={device!r} is not a device: use 'cpu' or 'cuda'") from error
    if found.type == "cuda" and not has_cuda:
        raise ConfigValueError(f"device={device!r}: this process sees no CUDA device; use 'cpu'")
    if found.type not in ("cpu", "cuda"):
        raise ConfigValueError(f"device={device!r} cannot be calibrated: use 'cpu' or 'cuda'")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found


# Which ranks share a host, and what levels follow.


def _hosts() -> tuple[tuple[int, ...], ...]:
    """The ranks of each host, hosts in the order of their first rank.

    GROUP_RANK is torchrun's number of the node: it tells containers apart that call themselves by one name.
    """
    members: dict[tuple[str, str], list[int]] = {}
    for rank, host in enumerate(gather_objects((socket.gethostname(), os.environ.get("GROUP_RANK", "")))):
        members.setdefault(host, []).append(rank)
    return tuple(tuple(ranks) for ranks in members.values())


@dataclass(frozen=True)
class _Planned:
    """A level to measure. domains: as in Level. groups: ranks that run one collective; all groups run at once."""

    name: str
    domains: int | tuple[tuple[int, ...], ...] | None
    groups: tuple[tuple[int, ...], ...]


def _levels_of(hosts: Sequence[tuple[int, ...]]) -> list[_Planned]:
    """The levels, the innermost first: the ranks of each host, and the hosts.

    Between hosts the first ranks of all of them are one group, the second ranks another, and so on: what counts is
    what a rank can send while the ranks that share its network card do the same.
    """
    everyone = (tuple(range(sum(len(ranks) for ranks in hosts))),)
    if len(hosts) == 1:
        return [_Planned("host", None, everyone)]
    network = _Planned("network", None, tuple(zip(*hosts, strict=False)))
    if all(len(ranks) == 1 for ranks in hosts):
        return [network]
    return [_Planned("host", _domains(hosts), tuple(ranks for ranks in hosts if len(ranks) > 1)), network]


def _domains(hosts: Sequence[tuple[int, ...]]) -> int | tuple[tuple[int, ...], ...]:
    """A block size where all hosts have consecutive blocks of one size."""
    size = len(hosts[0])
    blocks = [tuple(range(i * size, (i + 1) * size)) for i in range(len(hosts))]
    return size if list(hosts) == blocks else tuple(hosts)


def _spec_of(planned: _Planned, level: LevelReport, source: str) -> Level:
    return Level(
        name=level.name,
        domains=planned.domains,
        alpha=level.alpha,
        bandwidth=level.bandwidth,
        burst_bytes=level.burst.nbytes,
        burst_bandwidth=level.burst.bandwidth,
        alpha_busy=level.alpha_busy,
        bandwidth_busy=level.bandwidth_busy,
        host_seconds_per_byte=level.host_seconds_per_byte,
        source=source,
    )


# The network.


def _measure_level(planned: _Planned, device: torch.device, seconds: float, heed: Heed | None) -> LevelReport:
    rank = dist.get_rank()
    # Every rank must make every group, in the same order.
    handles = [dist.new_group(list(ranks), timeout=world_timeout()) for ranks in planned.groups]
    let_lock_holders_run()  # as in a step
    own = [(handle, ranks) for handle, ranks in zip(handles, planned.groups, strict=True) if rank in ranks]
    mine = NetworkFigures()
    for handle, ranks in own:
        mine = measure_group(Group(handle, ranks, device, heed), planned.name, seconds)
    everybody = gather_objects(mine)
    for handle, _ in own:
        dist.destroy_process_group(handle)
    return _report_level(planned.name, planned.groups, everybody)


def _report_level(name: str, groups: tuple[tuple[int, ...], ...], everybody: Sequence[NetworkFigures]) -> LevelReport:
    samples: list[Sample] = []
    pipelined: list[Sample] = []
    rested: list[Sample] = []
    for ranks in groups:
        found = [everybody[rank] for rank in ranks]
        samples.extend(_slowest(column) for column in zip(*(each.samples for each in found), strict=True))
        pipelined.append(_slowest([each.pipelined for each in found if each.pipelined is not None]))
        rested.extend(_slowest(column) for column in zip(*(each.rested for each in found), strict=True))
    single = fit(samples)
    final = fit(samples, min(_carried(row, single) for row in pipelined))
    by_kind: dict[str, list[float]] = {}
    for sample, error in zip(samples, final.errors, strict=True):
        by_kind.setdefault(sample.kind, []).append(error)
    alpha = max(final.alpha, LEAST_ALPHA)
    beside = [each.contention for each in everybody if each.contention is not None]
    latency = max((each.latency for each in beside), default=0.0)
    bandwidth = min((each.bandwidth for each in beside), default=0.0)
    return LevelReport(
        name=name,
        groups=groups,
        alpha=alpha,
        bandwidth=final.bandwidth,
        fitted_bandwidth=single.bandwidth,
        burst=burst(rested, final.bandwidth, alpha),
        host_seconds_per_byte=max((each.per_byte for each in beside), default=0.0),
        overhead=max((each.per_message for each in beside), default=0.0),
        alpha_busy=latency if latency > LEAST_SLOWED * alpha else 0.0,
        bandwidth_busy=bandwidth if bandwidth < MOST_HELD_BACK * final.bandwidth else 0.0,
        median_error=final.median_error,
        max_error=final.max_error,
        kind_errors={kind: median(errors) for kind, errors in by_kind.items()},
        samples=tuple(samples),
    )


def _carried(row: Sample, single: Fit) -> float:
    """Bytes per second of a row; where most of its time is latency, what single collectives say."""
    if row.messages * single.alpha > MOST_LATENCY * row.seconds:
        return single.bandwidth
    return row.wire_bytes / row.seconds


def _slowest(samples: Sequence[Sample]) -> Sample:
    return max(samples, key=lambda sample: sample.seconds)
