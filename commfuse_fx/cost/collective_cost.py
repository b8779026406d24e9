"""What one collective costs on a cluster: the alpha-beta model (Hockney, 1994).

A group that spans several levels is priced level by level, or as a whole at the pace of the slowest one. Bus bandwidth
is as nccl-tests defines it (doc/PERFORMANCE.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from commfuse_fx.cost.collective_formulas import COLLECTIVES, FORMULAS, Work, fits
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.machine.cluster import ClusterSpec, GroupSplit
from commfuse_fx.machine.cluster_parts import Level
from commfuse_fx.machine.presets import resolve_cluster
from commfuse_fx.support.checks import check_choice, check_number, show


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """What one collective costs each rank of its group.

    kind, algorithm: as `collective_cost` takes them; the algorithm is "none" for a group of one rank.
    seconds: from its start to its end; latency + transfer.
    latency: seconds of the messages that follow one another.
    transfer: seconds of bytes over bandwidth.
    host: seconds of the device's compute that it takes away meanwhile; not part of `seconds`.
    bus_bandwidth: bytes per second as nccl-tests defines it; 0 when it takes no time.
    links: names of the levels that it loads, from the innermost on.
    burst: seconds of `transfer` that its link carries at once after a pause. 0 where a level has no bursts, or
        the group spans several. `seconds` is the time without.
    boost: how many times as fast the link is in a burst; 1 without.
    slowed: how many times as long the latency is while the rank computes; at least 1.
    busy_speed: the part of its speed that the transfer has at most while the rank computes.
    last: of the latency, the part of the last message.
    """

    kind: str
    algorithm: str
    seconds: float
    latency: float
    transfer: float
    host: float
    bus_bandwidth: float
    links: tuple[str, ...]
    burst: float = 0.0
    boost: float = 1.0
    slowed: float = 1.0
    busy_speed: float = 1.0
    last: float = 0.0


_BUS_FACTOR: Mapping[str, Callable[[int], float]] = MappingProxyType(
    {
        "all_reduce": lambda k: 2 * (k - 1) / k,
        **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), lambda k: (k - 1) / k),
    }
)
"""Kind -> bus bandwidth over payload per second, by ranks; 1 for kinds that are left out."""


def algorithms(kind: str) -> tuple[str, ...]:
    """The algorithms that are known for a kind. Raises ConfigTypeError or ConfigValueError for an unknown kind."""
    check_choice(kind, "kind", COLLECTIVES)
    return tuple(FORMULAS[kind]) if kind == "send_recv" else (*FORMULAS[kind], "hierarchical")


def bus_bandwidth(kind: str, nbytes: float, ranks: int, seconds: float) -> float:
    """Bytes per second over the busiest link, from the payload and the time, as nccl-tests defines it.

    nbytes / seconds times 2(k-1)/k for all_reduce, (k-1)/k for all_gather, reduce_scatter, all_to_all, gather and
    scatter, and 1 for the others. 0 for one rank, and when `seconds` is 0. nbytes as in `collective_cost`.
    """
    if ranks == 1 or not seconds:
        return 0.0
    factor = _BUS_FACTOR[kind](ranks) if kind in _BUS_FACTOR else 1.0
    return factor * nbytes / seconds


def collective_cost(
    kind: str,
    nbytes: float,
    ranks: Sequence[int],
    cluster: ClusterSpec | str | os.PathLike[str],
    algorithm: str | None = None,
) -> CollectiveCost:
    """The predicted cost of one collective for a group of ranks of a cluster.

    kind: one of `COLLECTIVES`: "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather",
        "scatter", "all_to_all", "barrier" or "send_recv".
    nbytes: bytes of the full, unsharded buffer, as in the list below.
    ranks: the global ranks of the group.
    cluster: what the option of that name takes: a ClusterSpec, the name of a preset, or the path of a file.
    algorithm: one of `algorithms(kind)`. None: the cheapest that applies.

    What `nbytes` counts:

    - all_reduce, broadcast, reduce: the tensor, which is as large on every rank;
    - all_gather: the result, all shards together; reduce_scatter: the input of one rank;
    - gather, scatter: what the root has of all ranks together;
    - all_to_all: what one rank holds, of which it sends 1/k to each other rank;
    - send_recv: the message, which every rank sends to its neighbour; barrier: counts for nothing.

    A group inside one domain of a level is priced at that level. Of a group that spans several levels,
    "hierarchical" is the sum over the levels, each with its cheapest algorithm on its part of the payload. It
    applies when every part of the group has as many ranks. The other algorithms pass every level at the pace of
    the slowest one, at one rank's share of its bandwidth. Halving and doubling ("recursive") apply to powers of
    two.

    Raises ConfigTypeError or ConfigValueError for an unknown kind or algorithm, for an algorithm that does not
    apply to this group, for a negative nbytes and for ranks that the cluster does not have. Raises what
    `resolve_cluster` raises.
    """
    if kind not in COLLECTIVES:
        check_choice(kind, "kind", COLLECTIVES)
    size = check_number(nbytes, "nbytes")
    if not isinstance(cluster, ClusterSpec):
        cluster = resolve_cluster(cluster)
    split = cluster.split(ranks)
    if algorithm is not None:
        _check_applies(algorithm, kind, split, cluster)
    if split.size == 1:
        return CollectiveCost(kind, "none", 0.0, 0.0, 0.0, 0.0, 0.0, ())
    priced = [(found.algorithm, found.best(size)) for found in _candidates(kind, algorithm, split)]
    name, rate = min(priced, key=lambda each: each[1].seconds(size))
    seconds = rate.seconds(size)
    bus = bus_bandwidth(kind, size, split.size, seconds)
    links = tuple(level.name for level in split.levels)
    last = min(max(level.alpha for level in split.levels), rate.latency)
    extra = *_burst(split.levels), _slowed(split.levels), _busy_speed(split.levels), last
    return CollectiveCost(kind, name, seconds, rate.latency, rate.transfer * size, rate.host * size, bus, links, *extra)


def _slowed(levels: Sequence[Level]) -> float:
    """Of the slowest level, as messages go at its pace: one that waits for its core waits on every level."""
    alpha = max(level.alpha for level in levels)
    return max(alpha, *(level.alpha_busy for level in levels)) / alpha if alpha else 1.0


def _busy_speed(levels: Sequence[Level]) -> float:
    return min((level.bandwidth_busy / level.bandwidth for level in levels if level.bandwidth_busy), default=1.0)


def _burst(levels: Sequence[Level]) -> tuple[float, float]:
    if len(levels) > 1 or not levels[0].burst_bytes:
        return 0.0, 1.0
    level = levels[0]
    return level.burst_bytes / level.bandwidth, level.burst_bandwidth / level.bandwidth


class _Rate(NamedTuple):
    """What an algorithm costs on a level: seconds of latency, and seconds of transfer and of the host per byte."""

    latency: float
    transfer: float
    host: float

    def seconds(self, nbytes: float) -> float:
        return self.latency + self.transfer * nbytes


class _Candidate(NamedTuple):
    """An algorithm that applies to a group: stages one after another, each with the rates to choose from."""

    algorithm: str
    stages: tuple[tuple[_Rate, ...], ...]

    def best(self, nbytes: float) -> _Rate:
        """The sum over the stages, each with its cheapest rate."""
        found = [_cheapest(rates, nbytes) for rates in self.stages]
        if len(found) == 1:
            return found[0]
        return _Rate(*(sum(figures) for figures in zip(*found, strict=True)))


def _candidates(kind: str, algorithm: str | None, split: GroupSplit) -> tuple[_Candidate, ...]:
    """The algorithms that apply to a group of two ranks or more, or the one asked for; derived once per group."""
    known: tuple[_Candidate, ...] | None = split.memo.get((kind, algorithm))
    if known is not None:
        return known
    slowest = _slowest(split.levels)
    found = [
        _Candidate(name, ((_rate(formula(split.size), slowest),),))
        for name, formula in FORMULAS[kind].items()
        if algorithm in (None, name) and fits(name, split.size)
    ]
    if algorithm in (None, "hierarchical") and _has_hierarchy(kind, split):
        found.append(_Candidate("hierarchical", tuple(_stages(kind, split))))
    made = split.memo[kind, algorithm] = tuple(found)
    return made


def _rate(work: Work, level: Level, fraction: float = 1.0) -> _Rate:
    """The rate of an algorithm that handles a fraction of the payload."""
    nbytes = work.share * fraction
    return _Rate(work.messages * level.alpha, nbytes / level.bandwidth, nbytes * level.host_seconds_per_byte)


def _slowest(levels: Sequence[Level]) -> Level:
    """A level with the worst figures of all."""
    return Level(
        name="slowest",
        alpha=max(level.alpha for level in levels),
        bandwidth=min(level.bandwidth for level in levels),
        host_seconds_per_byte=max(level.host_seconds_per_byte for level in levels),
    )


def _cheapest(rates: Sequence[_Rate], nbytes: float) -> _Rate:
    """The first of the cheapest."""
    return rates[0] if len(rates) == 1 else min(rates, key=lambda rate: rate.seconds(nbytes))


def _stages(kind: str, split: GroupSplit) -> Iterator[tuple[_Rate, ...]]:
    """The rates to choose from for each collective that a hierarchical one consists of.

    all_gather and reduce_scatter: the shards of the inner levels are what the outer levels exchange, so each level
    handles what the levels inside it have left. gather and scatter: the other way round, an outer level handles what
    whole inner parts hold. broadcast, reduce: all of it on every level. all_to_all: every level sorts all that a rank
    holds. barrier: the inner levels gather, then release.
    """
    joined = 1
    for level, count in zip(split.levels, split.parts or (), strict=True):
        kinds, fraction = [kind], 1.0
        if kind in ("all_reduce", "all_gather", "reduce_scatter"):
            fraction = 1 / joined
        elif kind in ("gather", "scatter"):
            fraction = joined * count / split.size
        if level is not split.levels[-1]:
            if kind == "all_reduce":
                kinds = ["reduce_scatter", "all_gather"]
            elif kind == "barrier":
                kinds = ["barrier", "barrier"]
        for stage in kinds:
            formulas = FORMULAS[stage].items()
            yield tuple(_rate(formula(count), level, fraction) for name, formula in formulas if fits(name, count))
        joined *= count


def _has_hierarchy(kind: str, split: GroupSplit) -> bool:
    return kind != "send_recv" and len(split.levels) > 1 and split.parts is not None


def _check_applies(algorithm: object, kind: str, split: GroupSplit, cluster: ClusterSpec) -> None:
    name = check_choice(algorithm, f"algorithm of {kind}", algorithms(kind))
    if not fits(name, split.size):
        raise ConfigValueError(
            f"algorithm of {kind} is {show(name)}, but the group has {split.size} ranks, not a power of two; give "
            "another one, or None for the cheapest"
        )
    if name == "hierarchical" and not _has_hierarchy(kind, split) and split.size > 1:
        names = " and ".join(level.name for level in split.levels)
        reason = f"only spans {names}" if len(split.levels) == 1 else f"has parts of different sizes on {names}"
        raise ConfigValueError(
            f"algorithm of {kind} is {show(name)}, but on cluster {cluster.name} the group {reason}; give another one, "
            "or None for the cheapest"
        )
