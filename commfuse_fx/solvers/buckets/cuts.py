"""Which collectives of one key to merge when everything is waited for at the end of the backward.

Numbers only: times in seconds, sizes in bytes (or in seconds of pure transfer, with `beta` 1). A message of M bytes
holds the stream for alpha + beta * M, and one stream sends the messages of one key first in, first out. Consumers
further on in the same step: `solvers.consumers`; in the next step: `solvers.cyclic`.

Source: merging under alpha + beta * M, MG-WFBP (Shi, Chu, Li, "MG-WFBP: Efficient data communication for distributed
synchronous SGD algorithms", INFOCOM 2019).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple

from commfuse_fx.cost.numbers import EQUAL, check_same_length, check_time, check_times
from commfuse_fx.errors import ConfigValueError


@dataclass(frozen=True)
class Forced:
    """Members [begin, end) are one bucket already: never cut apart; with `alone`, never joined by others either."""

    begin: int
    end: int
    alone: bool = False


@dataclass(frozen=True)
class Cuts:
    """Cuts divide members into buckets of neighbours.

    finish: seconds at which the last bucket has been sent.
    buckets: [begin, end) of members, in send order.
    """

    finish: float
    buckets: tuple[tuple[int, int], ...]


class _Unit(NamedTuple):
    """What is never cut: one member, or a forced range of them."""

    begin: int
    end: int
    ready: float
    size: float
    alone: bool


def optimal_cuts(
    ready: Sequence[float],
    sizes: Sequence[float],
    alpha: float,
    beta: float,
    *,
    busy_until: float = 0.0,
    max_bytes: float | None = None,
    forced: Sequence[Forced] = (),
    also: Sequence[tuple[float, float]] = (),
) -> Cuts:
    """The cuts of a sequence of collectives into buckets whose last one ends first. O(n), with `also` for each line.

    ready: seconds, rising: when each member may be sent; a bucket may be when its last member may.
    sizes: bytes per member. alpha, beta: a bucket of M bytes takes alpha + beta * M seconds.
    busy_until: seconds until which the stream sends something else.
    max_bytes: no bucket is larger, except that one larger member (or forced range) stands alone.
    forced: ranges that are one bucket already. What is pre-merged out of the order of readiness is passed as one
        member that is ready when its last part is.
    also: more (alpha, beta); a bucket takes what the cheapest of all lines says, as where a library picks one of
        several algorithms by size.

    With prefix sizes S and f(0) = busy_until,

        f(j) = min over i < j of  max(f(i), r(j)) + alpha + beta * (S(j) - S(i))

    (the recurrence behind MG-WFBP, Shi et al. 2019, there solved by a greedy rule). f and r rise, so the i with
    f(i) <= r(j) are a prefix, in which the cost falls with i: the last is best. Those with f(i) > r(j) cost
    f(i) - beta * S(i) and a constant: the minimum of a sliding window, kept in a monotone queue. Both bounds on i
    (max_bytes and `alone` forbid i below some rising limit) only move up. The minimum over several lines is the minimum
    of what each of them gives for j, so that every line has a queue of its own.

    Buckets of neighbours in this order are enough: with no other limits, any partition sent in any order has, as its
    finish, the maximum over buckets of (its readiness + cost of itself and of all later ones); sent in the order of
    readiness, and each member moved to the first bucket that is ready no sooner than it, no term grows. (With
    `max_bytes` or `alone` the result is the best among buckets of neighbours; the best among all is bin packing. So it
    is with several lines, where a byte may cost more in a small bucket than in a large one.)

    Among cuts that finish at the same time (within `EQUAL`) those with the fewest buckets, and of these the one whose
    later buckets are the largest: going back from the end, each bucket takes all it can. With several lines, buckets
    that follow each other are joined, from the end on, wherever that delays nothing. Raises ConfigTypeError or
    ConfigValueError for what is no finite number of at least 0, falling `ready`, or forced ranges that overlap.
    """
    check_times("ready", ready)
    check_times("sizes", sizes)
    for name, value in (("alpha", alpha), ("beta", beta), ("busy_until", busy_until)):
        check_time(name, value)
    for index, pair in enumerate(also):
        check_times(f"also[{index}]", pair)
    if max_bytes is not None:
        check_time("max_bytes", max_bytes)
    check_same_length("ready", ready, "sizes", sizes)
    for index in range(1, len(ready)):
        if ready[index] < ready[index - 1]:
            raise ConfigValueError(
                f"ready[{index}] is {ready[index]!r}, less than the one before it; pass members in order of readiness"
            )
    units = _units(ready, sizes, max_bytes, forced)
    total = list(accumulate((unit.size for unit in units), initial=0.0))
    lowest = _lowest_begins(units, total, max_bytes)
    lines = tuple(dict.fromkeys([(alpha, beta), *also]))
    best, begins = _best_finish(units, total, lowest, lines, busy_until)
    if len(lines) == 1:
        ranges = _fewest(units, total, lowest, alpha, beta, best)
    else:
        ranges = _without_needless(units, total, lowest, lines, busy_until, _walk_back(begins))
    finish = busy_until
    for first, last in ranges:
        finish = max(finish, units[last - 1].ready) + _cheapest(lines, total[last] - total[first])
    return Cuts(finish, tuple((units[first].begin, units[last - 1].end) for first, last in ranges))


def _cheapest(lines: Sequence[tuple[float, float]], nbytes: float) -> float:
    return min(alpha + beta * nbytes for alpha, beta in lines)


def _units(
    ready: Sequence[float], sizes: Sequence[float], max_bytes: float | None, forced: Sequence[Forced]
) -> list[_Unit]:
    units: list[_Unit] = []

    def add(begin: int, end: int, alone: bool) -> None:
        size = sum(sizes[begin:end])
        too_large = max_bytes is not None and size > max_bytes
        units.append(_Unit(begin, end, ready[end - 1], size, alone or too_large))

    reached = 0
    for given in sorted(forced, key=lambda one: (one.begin, one.end)):
        if not 0 <= given.begin < given.end <= len(ready):
            raise ConfigValueError(f"forced range {given} is empty or not within the {len(ready)} members; correct it")
        if given.begin < reached:
            raise ConfigValueError(f"forced range {given} overlaps another; pass each member in at most one")
        for index in range(reached, given.begin):
            add(index, index + 1, False)
        add(given.begin, given.end, given.alone)
        reached = given.end
    for index in range(reached, len(ready)):
        add(index, index + 1, False)
    return units


def _lowest_begins(units: Sequence[_Unit], total: Sequence[float], max_bytes: float | None) -> list[int]:
    """For each end j, the lowest i for which units [i, j) may be one bucket. It rises with j."""
    lowest = [0]
    begin = 0
    for end, unit in enumerate(units, start=1):
        if unit.alone or (end > 1 and units[end - 2].alone):
            begin = end - 1
        while max_bytes is not None and begin < end - 1 and total[end] - total[begin] > max_bytes:
            begin += 1
        lowest.append(begin)
    return lowest


def _best_finish(
    units: Sequence[_Unit],
    total: Sequence[float],
    lowest: Sequence[int],
    lines: Sequence[tuple[float, float]],
    busy_until: float,
) -> tuple[float, list[int]]:
    """The first finish of all units, and for each end j where the last bucket of the best cuts of [0, j) begins."""
    finish = [busy_until]
    begins = [0]
    # By line: i and finish(i) - beta * total(i), which both rise from left to right.
    waiting: list[deque[tuple[int, float]]] = [deque() for _ in lines]
    idle = 0  # finish(i) <= ready of the current unit for i < idle: the stream stands still before the bucket
    for end, unit in enumerate(units, start=1):
        while idle < end and finish[idle] <= unit.ready:
            idle += 1
        best, begin = inf, end - 1
        if idle - 1 >= lowest[end]:
            best = unit.ready + _cheapest(lines, total[end] - total[idle - 1])
            begin = idle - 1
        for (alpha, beta), queue in zip(lines, waiting, strict=True):
            key = finish[end - 1] - beta * total[end - 1]
            while queue and queue[-1][1] >= key:
                queue.pop()
            queue.append((end - 1, key))
            while queue and queue[0][0] < max(idle, lowest[end]):
                queue.popleft()
            if queue and queue[0][1] + alpha + beta * total[end] < best:
                best, begin = queue[0][1] + alpha + beta * total[end], queue[0][0]
        finish.append(best)
        begins.append(begin)
    return finish[-1], begins


def _walk_back(begins: Sequence[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    end = len(begins) - 1
    while end > 0:
        ranges.append((begins[end], end))
        end = begins[end]
    return ranges[::-1]


def _without_needless(
    units: Sequence[_Unit],
    total: Sequence[float],
    lowest: Sequence[int],
    lines: Sequence[tuple[float, float]],
    busy_until: float,
    ranges: Sequence[tuple[int, int]],
) -> list[tuple[int, int]]:
    """The cuts with neighbours joined, from the end on, wherever all is sent in time nevertheless."""
    finish = [busy_until]
    for first, last in ranges:
        finish.append(max(finish[-1], units[last - 1].ready) + _cheapest(lines, total[last] - total[first]))
    kept: list[tuple[int, int]] = []
    latest = finish[-1] * (1 + EQUAL)  # when the bucket in hand must have been sent
    for index in range(len(ranges) - 1, -1, -1):
        first, last = ranges[index]
        if kept and lowest[kept[-1][1]] <= first:
            end = kept[-1][1]
            joined = max(finish[index], units[end - 1].ready) + _cheapest(lines, total[end] - total[first])
            if joined <= latest:
                kept[-1] = (first, end)
                continue
        if kept:
            latest -= _cheapest(lines, total[kept[-1][1]] - total[kept[-1][0]])
        kept.append((first, last))
    return kept[::-1]


def _fewest(
    units: Sequence[_Unit], total: Sequence[float], lowest: Sequence[int], alpha: float, beta: float, finish: float
) -> list[tuple[int, int]]:
    """The fewest buckets that finish in time, as [first, last) of units.

    A bucket is in time when its readiness and the cost of itself and all later ones stay within the finish. Of all
    ways to cut the tail into c buckets the one that begins first leaves the least to the others.
    """
    limit = finish * (1 + EQUAL)
    found: list[tuple[int, int]] = []
    end = len(units)
    while end > 0:
        begin = end - 1
        base = units[end - 1].ready + (len(found) + 1) * alpha
        while begin > lowest[end] and base + beta * (total[-1] - total[begin - 1]) <= limit:
            begin -= 1
        found.append((begin, end))
        end = begin
    return found[::-1]
