"""Which collectives of one key to merge, and in which order to send them, so that the predicted step is shortest.

Numbers only: times in seconds, sizes in bytes (or in seconds of pure transfer, with `beta` 1). A message of M bytes
holds the stream for alpha + beta * M, and one stream sends the messages of one key first in, first out.

Three questions, from the simplest to the most general:

- `optimal_cuts`: everything is waited for at the end of the backward;
- `optimal_plan`: every result has its own consumer further on in the same step;
- `cyclic_plan`, `choose_piece`: results are consumed by the forward of the next step.

Sources: merging under alpha + beta * M, MG-WFBP (Shi, Chu, Li, "MG-WFBP: Efficient data communication for distributed
synchronous SGD algorithms", INFOCOM 2019); priorities with partitioned transfers, P3 (Jayarajan et al.,
"Priority-based parameter propagation for distributed DNN training", MLSys 2019) and ByteScheduler (Peng et al., "A
generic communication scheduler for distributed DNN training acceleration", SOSP 2019); earliest deadline first, Horn
1974 ("Some simple scheduling algorithms") and Liu & Layland 1973.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from typing import NamedTuple

from commfuse_fx.errors import ConfigTypeError, ConfigValueError

EQUAL = 1e-9
"""Relative difference up to which two predicted times count as equal."""

PIECES = tuple(int(mebibytes * 2**20) for mebibytes in (0.5, 1, 2, 4, 8, 16, 32))
"""Sizes in bytes that `choose_piece` tries."""

_EXACT_MOST = 12  # The exact search looks at 3**n pairs of subsets.
_TRIED = 5  # From how many of the constructive plans the local search starts.
_WORK = 400_000  # How many messages the local search may simulate: a bound that no clock decides.


# One wait at the end ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forced:
    """Members [begin, end) are one bucket already: never cut apart; with `alone`, never joined by others either."""

    begin: int
    end: int
    alone: bool = False


@dataclass(frozen=True)
class Cuts:
    """finish: seconds at which the last bucket has been sent. buckets: [begin, end) of members, in send order."""

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
    _check_each("ready", ready)
    _check_each("sizes", sizes)
    for name, value in (("alpha", alpha), ("beta", beta), ("busy_until", busy_until)):
        _check(name, value)
    for index, pair in enumerate(also):
        _check_each(f"also[{index}]", pair)
    if max_bytes is not None:
        _check("max_bytes", max_bytes)
    _check_same_length("ready", ready, "sizes", sizes)
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


# Consumers further on in the same step ------------------------------------------------------------------------------


Item = tuple[str, float]
"""Of a compute program: ("run", seconds), ("ready", member) or ("need", member)."""


@dataclass(frozen=True)
class Plan:
    """buckets: the members of each, in send order. finish: seconds until the compute program ends."""

    buckets: tuple[tuple[int, ...], ...]
    finish: float


class _Bucket(NamedTuple):
    """Members in the order of readiness; positions in the program of the last "ready" and the first "need"."""

    members: tuple[int, ...]
    ready: int
    need: int
    seconds: float


def simulate_plan(
    items: Sequence[Item], sizes: Sequence[float], alpha: float, beta: float, plan: Sequence[Sequence[int]]
) -> float:
    """Seconds until the compute program ends, with these buckets sent in this order.

    items: what the compute stream does, in order: ("run", seconds); ("ready", m): member m may be sent from here on;
        ("need", m): go on only when the bucket of m has arrived. sizes: bytes per member.
    A bucket is issued where its last member is ready and all earlier buckets have been issued; it starts when the
    one before it has ended, and takes alpha + beta * (its bytes).

    Raises ConfigValueError when the plan does not hold every member exactly once, or when a member is needed before
    its bucket can be issued (the step would wait for ever).
    """
    program = _Program(items, sizes, alpha, beta)
    if not all(plan) or sorted(member for bucket in plan for member in bucket) != list(range(len(sizes))):
        raise ConfigValueError(f"plan {plan!r} must hold each of the {len(sizes)} members once, and no empty bucket")
    bucket_of = {member: index for index, bucket in enumerate(plan) for member in bucket}
    missing = [len(bucket) for bucket in plan]
    ends: list[float] = []
    now = 0.0
    for kind, value in program.items:
        if kind == "run":
            now += value
        elif kind == "ready":
            missing[bucket_of[int(value)]] -= 1
            while len(ends) < len(plan) and missing[len(ends)] == 0:
                bytes_ = sum(sizes[member] for member in plan[len(ends)])
                ends.append(max(now, ends[-1] if ends else 0.0) + alpha + beta * bytes_)
        else:
            index = bucket_of[int(value)]
            if index >= len(ends):
                raise ConfigValueError(
                    f"plan: member {value} is needed before bucket {index} can be issued; send that bucket earlier, "
                    f"or take out of it, and out of those before it, what is ready only later"
                )
            now = max(now, ends[index])
    return now


def optimal_plan(
    items: Sequence[Item], sizes: Sequence[float], alpha: float, beta: float, exact_limit: int = 8
) -> Plan:
    """Buckets and their order on one stream, so that the compute program ends first.

    The arguments are those of `simulate_plan`. Each member has one "ready" and, after it, at least one "need"; only
    the first counts. Members merge legally when all are ready before the first of them is needed.

    Up to `exact_limit` members (at most 12) the result is optimal over all legal partitions and orders. Above, it is
    the best of `starting_plans` improved by a local search along the critical chain (merge, swap, move, split, shift a
    member across a boundary; a merge is taken when the program ends no later), which spends a fixed number of
    simulated messages. Among plans that end at the same time it prefers fewer buckets.

    Merging under alpha + beta * M is that of MG-WFBP (Shi et al. 2019); sending what is needed first first, that of
    P3 and ByteScheduler (both 2019). Raises ConfigTypeError or ConfigValueError for bad numbers, unknown items, or a
    member without "ready" and a later "need".
    """
    if not isinstance(exact_limit, int) or not 0 <= exact_limit <= _EXACT_MOST:
        raise ConfigValueError(f"exact_limit is {exact_limit!r}; pass an int from 0 to {_EXACT_MOST}")
    program = _Program(items, sizes, alpha, beta)
    starts = sorted(_starts(program), key=lambda plan: (program.finish(plan), len(plan)))
    found = min(
        (_improve(program, start, _WORK // _TRIED) for start in _different(starts)[:_TRIED]),
        key=lambda plan: (program.finish(plan), len(plan)),
    )
    if len(sizes) <= exact_limit:
        found = _exact(program, found)
    return program.plan(found)


def starting_plans(items: Sequence[Item], sizes: Sequence[float], alpha: float, beta: float) -> tuple[Plan, ...]:
    """The constructive plans from which the search of `optimal_plan` starts, all legal; its arguments.

    No fusion; the cuts of `optimal_cuts`; everything that may be merged with its neighbours; one bucket per point of
    need; and for a ladder of sizes, the neighbours in order of readiness or of need cut by size and sent in order of
    readiness or earliest need first.
    """
    program = _Program(items, sizes, alpha, beta)
    return tuple(program.plan(plan) for plan in _starts(program))


class _Program:
    """A checked compute program: where each member is ready and first needed, and the compute time up to there."""

    def __init__(self, items: Sequence[Item], sizes: Sequence[float], alpha: float, beta: float) -> None:
        _check("alpha", alpha)
        _check("beta", beta)
        _check_each("sizes", sizes)
        self.items = tuple(items)
        self.sizes = tuple(sizes)
        self.alpha = alpha
        self.beta = beta
        self.clock: list[float] = []
        self.ready: list[int] = [-1] * len(sizes)
        self.need: list[int] = [-1] * len(sizes)
        now = 0.0
        for position, (kind, value) in enumerate(self.items):
            self.clock.append(now)
            if kind == "run":
                _check(f"items[{position}]", value)
                now += value
            else:
                self._place(position, kind, value)
        self.total = now
        for member, position in enumerate(self.need):
            if position < 0:
                raise ConfigValueError(f'member {member} is never needed; add ("need", {member}) after its "ready"')

    def _place(self, position: int, kind: str, value: float) -> None:
        if kind not in ("ready", "need"):
            raise ConfigValueError(f'items[{position}] is of kind {kind!r}; pass "run", "ready" or "need"')
        if not isinstance(value, int) or not 0 <= value < len(self.sizes):
            raise ConfigValueError(f"items[{position}] names member {value!r}; pass an index into `sizes`")
        if kind == "ready":
            if self.ready[value] >= 0:
                raise ConfigValueError(f"items[{position}]: member {value} is ready twice; keep the last of them")
            self.ready[value] = position
        elif self.ready[value] < 0:
            raise ConfigValueError(f'items[{position}]: member {value} is needed before it is ready; move its "ready"')
        elif self.need[value] < 0:
            self.need[value] = position

    def bucket(self, members: Sequence[int]) -> _Bucket:
        ordered = tuple(sorted(members, key=self.ready.__getitem__))
        seconds = self.alpha + self.beta * sum(self.sizes[member] for member in ordered)
        return _Bucket(ordered, self.ready[ordered[-1]], min(self.need[member] for member in ordered), seconds)

    def plan(self, buckets: Sequence[_Bucket]) -> Plan:
        return Plan(tuple(bucket.members for bucket in buckets), self.finish(buckets))

    def finish(self, buckets: Sequence[_Bucket]) -> float:
        """The end of the program as `simulate_plan` finds it, in O(buckets * log buckets); inf for an illegal plan."""
        return self.trace(buckets)[0]

    def trace(self, buckets: Sequence[_Bucket]) -> tuple[float, list[int]]:
        """The end of the program, and which buckets it hangs on, the last sent first.

        These are the buckets sent without a pause up to the one whose wait delayed the end; and, if the first of
        them was issued late because of an earlier wait, those that this one hangs on.
        """
        clock = self.clock
        waits = sorted([(bucket.need, index) for index, bucket in enumerate(buckets)])
        ends = [0.0] * len(buckets)
        hangs = [-1] * len(buckets)  # the bucket that this one had to start after; -1 where only compute held it
        delay = free = 0.0
        blame = issue = -1
        done = 0
        for index, (_, ready, need, seconds) in enumerate(buckets):
            if ready > issue:
                issue = ready
            if need < issue:
                return inf, []
            while waits[done][0] < issue:
                position, which = waits[done]
                late = ends[which] - clock[position]
                if late > delay:
                    delay, blame = late, which
                done += 1
            start = clock[issue] + delay
            hangs[index] = blame
            if free > start:
                start = free
                hangs[index] = index - 1
            free = ends[index] = start + seconds
        for position, which in waits[done:]:
            late = ends[which] - clock[position]
            if late > delay:
                delay, blame = late, which
        chain: list[int] = []
        while blame >= 0:
            chain.append(blame)
            blame = hangs[blame]
        return self.total + delay, chain


def _cut(program: _Program, sequence: Sequence[int], limit: float) -> list[_Bucket]:
    """Neighbours of the sequence in buckets of at most `limit` bytes, as far as they merge legally."""
    buckets: list[_Bucket] = []
    group: list[int] = []
    size, ready, need = 0.0, -1, -1
    for member in sequence:
        last = max(ready, program.ready[member])
        first = min(need, program.need[member])
        if group and (size + program.sizes[member] > limit or last > first):
            buckets.append(program.bucket(group))
            group = []
        if not group:
            size, last, first = 0.0, program.ready[member], program.need[member]
        group.append(member)
        size, ready, need = size + program.sizes[member], last, first
    if group:
        buckets.append(program.bucket(group))
    return buckets


def _starts(program: _Program) -> list[list[_Bucket]]:
    members = range(len(program.sizes))
    by_ready = sorted(members, key=program.ready.__getitem__)
    by_need = sorted(members, key=program.need.__getitem__)
    starts = [[program.bucket([member]) for member in by_ready]]
    times = [program.clock[program.ready[member]] for member in by_ready]
    cuts = optimal_cuts(times, [program.sizes[member] for member in by_ready], program.alpha, program.beta)
    starts.append([bucket for begin, end in cuts.buckets for bucket in _cut(program, by_ready[begin:end], inf)])
    points: list[list[int]] = []
    for member in by_need:
        between = program.items[program.need[points[-1][-1]] : program.need[member]] if points else ()
        if points and all(kind == "need" for kind, _ in between):
            points[-1].append(member)
        else:
            points.append([member])
    starts.append([program.bucket(point) for point in points])
    limit = float(sum(program.sizes))
    smallest = min(program.sizes, default=0.0)
    for _ in range(11):
        for sequence in (by_ready, by_need):
            buckets = _cut(program, sequence, limit)
            buckets.sort(key=lambda bucket: bucket.ready)
            starts.append(buckets)
            starts.append(_earliest_need_first(program, buckets))
        if limit <= smallest:
            break
        limit /= 2
    return [plan for plan in starts if program.finish(plan) < inf]


def _different(plans: Sequence[list[_Bucket]]) -> list[list[_Bucket]]:
    return [plan for index, plan in enumerate(plans) if index == 0 or plan != plans[index - 1]]


def _earliest_need_first(program: _Program, buckets: Sequence[_Bucket]) -> list[_Bucket]:
    """List scheduling: whenever the stream is free, the bucket that may be sent and is needed first."""
    events = sorted(
        [(bucket.ready, index) for index, bucket in enumerate(buckets)]
        + [(bucket.need, index) for index, bucket in enumerate(buckets)]
    )
    waiting: list[tuple[int, int]] = []
    ends: dict[int, float] = {}
    delay = free = before = 0.0

    def send() -> None:
        nonlocal free
        _, index = heappop(waiting)
        free = ends[index] = max(free, before) + buckets[index].seconds

    for position, index in events:
        now = program.clock[position] + delay
        while waiting and max(free, before) < now:
            send()
        if position == buckets[index].ready:
            heappush(waiting, (buckets[index].need, index))
        else:
            while index not in ends:
                send()
            delay = max(delay, ends[index] - program.clock[position])
            now = program.clock[position] + delay
        before = now
    return [buckets[index] for index in ends]


def _improve(program: _Program, plan: list[_Bucket], work: int) -> list[_Bucket]:
    """Local search: along the critical chain while that helps, then merges that cost nothing, and again.

    work: how many simulated messages it may spend.
    """
    best, chain = program.trace(plan)
    kept = work // 4  # for the merges
    again = True
    while again:
        again = False
        for candidate in _around(program, plan, chain):
            work -= len(candidate)
            if work < kept:
                break
            finish, hangs = program.trace(candidate)
            if finish < best * (1 - EQUAL) or (finish <= best and len(candidate) < len(plan)):
                plan, best, chain, again = candidate, finish, hangs, True
                break
        if again:
            continue
        ranges = [(0, len(plan) - 1)]  # of pairs (i, i + 1); from the end, so that those still to come keep their place
        while ranges:
            first, last = ranges.pop()
            candidate = _merged(program, plan, first, last)
            if len(candidate) == len(plan):
                continue
            work -= len(candidate)
            if work < 0:
                return plan
            finish, hangs = program.trace(candidate)
            if finish <= best:
                plan, best, chain, again = candidate, finish, hangs, True
            elif last - first > 1:
                middle = (first + last) // 2
                ranges += [(first, middle), (middle, last)]
    return plan


def _around(program: _Program, plan: list[_Bucket], chain: Sequence[int]) -> Iterator[list[_Bucket]]:
    """Plans one move away from this one, at the buckets of the chain: merge, swap, shift a member, move, split."""
    for index in chain:
        for left in (index - 1, index):
            if 0 <= left < len(plan) - 1:
                merged = _merged(program, plan, left, left + 1)
                if len(merged) < len(plan):
                    yield merged
                yield [*plan[:left], plan[left + 1], plan[left], *plan[left + 2 :]]
                yield from _shifted(program, plan, left)
        for to in (index - 2, index - 4, index + 2, index + 4):
            if 0 <= to < len(plan):
                moved = [*plan[:index], *plan[index + 1 :]]
                moved.insert(to, plan[index])
                yield moved
        members = plan[index].members
        if len(members) > 1:
            by_need = tuple(sorted(members, key=program.need.__getitem__))
            for order in (members, by_need) if by_need != members else (members,):
                for at in dict.fromkeys((len(order) // 2, 1, len(order) - 1)):
                    halves = [program.bucket(order[:at]), program.bucket(order[at:])]
                    yield [*plan[:index], *halves, *plan[index + 1 :]]


def _merged(program: _Program, plan: list[_Bucket], first: int, last: int) -> list[_Bucket]:
    """The plan with the pairs (i, i + 1), first <= i < last, merged that can be, each bucket in one pair at most."""
    made: list[_Bucket] = []
    index = first
    while index <= last and index < len(plan):
        one = plan[index]
        other = plan[index + 1] if index < last else one
        if index < last and max(one.ready, other.ready) < min(one.need, other.need):
            one = program.bucket(one.members + other.members)
            index += 1
        made.append(one)
        index += 1
    return [*plan[:first], *made, *plan[index:]]


def _shifted(program: _Program, plan: list[_Bucket], left: int) -> Iterator[list[_Bucket]]:
    """One member moved across the boundary behind bucket `left`: the last ready or needed, or the first."""
    one, other = plan[left].members, plan[left + 1].members
    pairs: list[tuple[list[int], list[int]]] = []
    if len(one) > 1:
        for member in dict.fromkeys((one[-1], max(one, key=program.need.__getitem__))):
            pairs.append(([m for m in one if m != member], [*other, member]))
    if len(other) > 1:
        for member in dict.fromkeys((other[0], min(other, key=program.need.__getitem__))):
            pairs.append(([*one, member], [m for m in other if m != member]))
    for first, second in pairs:
        made = [program.bucket(first), program.bucket(second)]
        if all(bucket.ready < bucket.need for bucket in made):
            yield [*plan[:left], *made, *plan[left + 2 :]]


class _Label(NamedTuple):
    """A way to have sent some members: when the stream is free, and how late compute is at each point of need."""

    free: float
    late: tuple[float, ...]
    messages: int
    sent: tuple[int, ...]


def _exact(program: _Program, incumbent: list[_Bucket]) -> list[_Bucket]:
    """The best plan, by labels over subsets of sent members.

    What follows depends on the set sent (it fixes how far the program must have come), on when the stream is free,
    and on how late the program is at each need; all later times rise with these. So for each set only labels that no
    other one matches in everything are kept, and of them those whose lower bound can still beat the incumbent: all
    that is left and needed up to some point passes the stream, and then the rest of the program runs.
    """
    count = len(program.sizes)
    if count == 0:
        return incumbent
    full = (1 << count) - 1
    needs = sorted(program.need)
    bucket = [_Bucket((), -1, len(program.items), 0.0)]
    bucket += [program.bucket([m for m in range(count) if mask >> m & 1]) for mask in range(1, full + 1)]
    rest = [_rest(program, bucket[mask]) for mask in range(full + 1)]
    best = (program.finish(incumbent), len(incumbent))
    found: tuple[int, ...] | None = None
    labels: list[list[_Label]] = [[] for _ in range(full + 1)]
    labels[0].append(_Label(0.0, (0.0,) * count, 0, ()))
    for mask in range(full):
        left = full ^ mask
        part = left
        while part and labels[mask]:
            issue, need = max(bucket[mask].ready, bucket[part].ready), bucket[part].need
            if issue < min(need, bucket[left ^ part].need):
                passed, at = bisect_left(needs, issue), bisect_left(needs, need)
                for label in labels[mask]:
                    start = max(label.free, program.clock[issue] + (label.late[passed - 1] if passed else 0.0))
                    free = start + bucket[part].seconds
                    delay = free - program.clock[need]
                    late = label.late[:at] + tuple([max(value, delay) for value in label.late[at:]])
                    bound = max(program.total + late[-1], free + rest[left ^ part])
                    if (bound, label.messages + 1) >= best:
                        continue
                    new = _Label(free, late, label.messages + 1, (*label.sent, part))
                    if mask | part == full:
                        best, found = (bound, new.messages), new.sent
                    else:
                        _keep(labels[mask | part], new, max(passed - 1, 0))
            part = (part - 1) & left
    return incumbent if found is None else [bucket[mask] for mask in found]


def _rest(program: _Program, left: _Bucket) -> float:
    """Seconds from when the stream is free to the end of the program, at least, with these members still to send."""
    most = -inf
    seconds = program.alpha
    for member in sorted(left.members, key=program.need.__getitem__):
        seconds += program.beta * program.sizes[member]
        most = max(most, seconds + program.total - program.clock[program.need[member]])
    return most


def _keep(labels: list[_Label], new: _Label, since: int) -> None:
    """Add a label unless another is as good in everything; drop those that it beats. Lateness counts from `since`."""

    def covers(one: _Label, other: _Label) -> bool:
        return (
            one.free <= other.free
            and one.messages <= other.messages
            and all(a <= b for a, b in zip(one.late[since:], other.late[since:], strict=True))
        )

    if not any(covers(old, new) for old in labels):
        labels[:] = [old for old in labels if not covers(new, old)]
        labels.append(new)


# Consumers in the next step -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CyclicMember:
    """One bucket of gradients and the parameters that they update.

    nbytes: its size. ready: index of the backward block after which it may be sent. need: index of the first
    forward block that needs its updated parameters. update: seconds of compute that its update takes.
    """

    nbytes: int
    ready: int
    need: int
    update: float = 0.0


@dataclass(frozen=True)
class CyclicPlan:
    """A training loop in its steady state.

    order: (member, begin byte, end byte) in send order, the same in every step. issue_after: for each of them the
    index of the backward block after which it, and all before it, can be issued. update_order: (member, index of the
    forward block before which its update stands) in the order of execution; each update first waits for its
    transfer. period: seconds per step.
    """

    order: tuple[tuple[int, int, int], ...]
    issue_after: tuple[int, ...]
    update_order: tuple[tuple[int, int], ...]
    period: float


@dataclass(frozen=True)
class PieceChoice:
    """piece: bytes, None when nothing is cut. groups: which of the given members form each member of the plan."""

    piece: int | None
    groups: tuple[tuple[int, ...], ...]
    plan: CyclicPlan


class _Message(NamedTuple):
    """A piece on the stream. `speed`: what part of its speed compute keeps in the meantime."""

    member: int
    start: float
    end: float
    speed: float


def period_bound(
    forward: Sequence[float],
    backward: Sequence[float],
    members: Sequence[CyclicMember],
    alpha: float,
    beta: float,
    host: float = 0.0,
) -> float:
    """Seconds that no plan for these members can undercut; the arguments are those of `cyclic_plan`.

    The maximum of all that the compute stream does (blocks, updates, `host` seconds per byte) and all that the
    stream sends (each member at least once).
    """
    _check_cyclic(forward, backward, members, alpha, beta, host)
    compute = sum(forward) + sum(backward) + sum(member.update for member in members)
    compute += host * sum(member.nbytes for member in members)
    return max(compute, sum(_seconds(member.nbytes, alpha, beta, host) for member in members))


def cyclic_plan(
    forward: Sequence[float],
    backward: Sequence[float],
    members: Sequence[CyclicMember],
    alpha: float,
    beta: float,
    piece: int | None,
    host: float = 0.0,
    message: float = 0.0,
) -> CyclicPlan:
    """Send order and places of the updates for a loop in which transfers may run on into the next step's forward.

    forward, backward: seconds per block, in order. members: what is sent. alpha, beta: a message of b bytes takes
    alpha + beta * b seconds. piece: bytes at whose multiples a transfer may give way to a more urgent one, None for
    never. host: seconds of compute that moving one byte takes; compute runs slower by that much while the message is
    on its way (and a message takes at least host * b). message: seconds of compute that handing over one message takes.

    Whenever the stream is free, the piece goes that the next forward needs first, ties by readiness (earliest
    deadline first: Horn 1974, Liu & Layland 1973; for training: P3, Jayarajan et al. 2019, and ByteScheduler, Peng
    et al. 2019). Pieces of one member that follow each other in the resulting order are sent as one message: cutting
    pays only where another one comes between. An update runs before the first block that needs it, or earlier, where
    compute would have to wait for something else. For given arrivals no placement of the updates ends the forward
    sooner: compute rests only when everything left hangs on a transfer that has not arrived.

    Every member is needed by some forward block, so at the start of each backward the stream is empty and every
    update done: each round from there on is the same, and one of them is the steady state.

    The result is never slower than sending whole members in order of readiness and updating all of them before the
    forward. O(n log n) for n pieces. Raises ConfigTypeError or ConfigValueError for bad numbers or block indices.
    """
    return _fastest(cyclic_plans(forward, backward, members, alpha, beta, piece, host, message))


def cyclic_plans(
    forward: Sequence[float],
    backward: Sequence[float],
    members: Sequence[CyclicMember],
    alpha: float,
    beta: float,
    piece: int | None,
    host: float = 0.0,
    message: float = 0.0,
) -> tuple[CyclicPlan, ...]:
    """What `cyclic_plan` takes the fastest of: plans by readiness, by need, and by need in pieces. Its arguments."""
    _check_cyclic(forward, backward, members, alpha, beta, host)
    _check("message", message)
    if piece is not None and (not isinstance(piece, int) or piece <= 0):
        raise ConfigValueError(f"piece is {piece!r}; pass a positive number of bytes, or None")
    loop = _Loop(forward, backward, members, alpha, beta, host, message)
    whole = [(index, 0, member.nbytes) for index, member in enumerate(members)]
    plans = [loop.plan(sorted(whole, key=lambda one: members[one[0]].ready)), loop.plan(loop.earliest_first(whole))]
    if piece is not None:
        cut = [
            (index, begin, min(begin + piece, member.nbytes))
            for index, member in enumerate(members)
            for begin in range(0, max(member.nbytes, 1), piece)
        ]
        if len(cut) > len(whole):
            plans.append(loop.plan(_joined(loop.earliest_first(cut))))
    return tuple(plans)


def choose_piece(
    forward: Sequence[float],
    backward: Sequence[float],
    members: Sequence[CyclicMember],
    alpha: float,
    beta: float,
    host: float = 0.0,
    message: float = 0.0,
    *,
    pieces: Sequence[int] = PIECES,
    merges: Sequence[int] = PIECES,
) -> PieceChoice:
    """The best `cyclic_plan` over sizes of pieces, and over merges of the members.

    pieces: sizes in bytes to try, besides not cutting. merges: sizes in bytes; for each one, members that follow
    each other in order of readiness are merged until they have that size (a merged member is ready with its last
    part, needed with its first, and updated as a whole); () keeps the members as they are, which is always tried.
    Of equal periods (within `EQUAL`) the one with fewer messages, then the first in this order: fewer merges, larger
    pieces. The other arguments and the errors are those of `cyclic_plan`.
    """
    choices = [
        choice
        for choice, _ in piece_choices(
            forward, backward, members, alpha, beta, host, message, pieces=pieces, merges=merges
        )
    ]
    best = _fastest([choice.plan for choice in choices])
    return next(choice for choice in choices if choice.plan is best)


def piece_choices(
    forward: Sequence[float],
    backward: Sequence[float],
    members: Sequence[CyclicMember],
    alpha: float,
    beta: float,
    host: float = 0.0,
    message: float = 0.0,
    *,
    pieces: Sequence[int] = PIECES,
    merges: Sequence[int] = PIECES,
) -> Iterator[tuple[PieceChoice, list[CyclicMember]]]:
    """All that `choose_piece` chooses from, each with the merged members that its plan refers to; its arguments."""
    _check_cyclic(forward, backward, members, alpha, beta, host)
    for name, given in (("pieces", pieces), ("merges", merges)):
        if not all(isinstance(size, int) and size > 0 for size in given):
            raise ConfigValueError(f"{name} is {given!r}; pass positive numbers of bytes")
    seen: dict[tuple[tuple[int, ...], ...], None] = {}
    for limit in (0, *sorted(merges)):
        groups = _groups(members, limit)
        if groups in seen:
            continue
        seen[groups] = None
        merged = [merged_member([members[index] for index in group]) for group in groups]
        largest = max((member.nbytes for member in merged), default=0)
        orders: dict[tuple[tuple[int, int, int], ...], None] = {}
        for piece in (None, *sorted((size for size in pieces if size < largest), reverse=True)):
            for plan in cyclic_plans(forward, backward, merged, alpha, beta, piece, host, message):
                if plan.order not in orders:
                    orders[plan.order] = None
                    yield PieceChoice(piece, groups, plan), merged


def _seconds(nbytes: int, alpha: float, beta: float, host: float) -> float:
    return max(alpha + beta * nbytes, host * nbytes)


def _fastest(plans: Sequence[CyclicPlan]) -> CyclicPlan:
    """Of the plans within `EQUAL` of the shortest period the one with the fewest messages, and of those the first."""
    limit = min(plan.period for plan in plans) * (1 + EQUAL)
    return min((plan for plan in plans if plan.period <= limit), key=lambda plan: len(plan.order))


def _groups(members: Sequence[CyclicMember], limit: int) -> tuple[tuple[int, ...], ...]:
    groups: list[tuple[int, ...]] = []
    group: list[int] = []
    size = 0
    for index in sorted(range(len(members)), key=lambda i: members[i].ready):
        group.append(index)
        size += members[index].nbytes
        if size >= limit:
            groups.append(tuple(group))
            group, size = [], 0
    if group:
        groups.append(tuple(group))
    return tuple(groups)


def merged_member(parts: Sequence[CyclicMember]) -> CyclicMember:
    """One bucket of these: ready with its last part, needed with its first, updated as a whole."""
    return CyclicMember(
        sum(part.nbytes for part in parts),
        max(part.ready for part in parts),
        min(part.need for part in parts),
        sum(part.update for part in parts),
    )


def _joined(order: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    joined: list[tuple[int, int, int]] = []
    for member, begin, end in order:
        if joined and joined[-1][0] == member and joined[-1][2] == begin:
            joined[-1] = (member, joined[-1][1], end)
        else:
            joined.append((member, begin, end))
    return joined


@dataclass(frozen=True)
class _Loop:
    """One round of the loop, from the start of a backward to the end of the forward that follows it."""

    forward: Sequence[float]
    backward: Sequence[float]
    members: Sequence[CyclicMember]
    alpha: float
    beta: float
    host: float
    message: float = 0.0

    def earliest_first(self, pieces: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """The pieces in the order in which earliest need first sends them."""

        def urgency(piece: tuple[int, int, int]) -> tuple[int, int, int, int]:
            member = self.members[piece[0]]
            return member.need, member.ready, piece[0], piece[1]

        ranked = sorted(pieces, key=urgency)
        sent, _ = self._send([(self.members[piece[0]].ready, piece) for piece in ranked])
        return [ranked[rank] for rank, _ in sent]

    def plan(self, order: Sequence[tuple[int, int, int]]) -> CyclicPlan:
        """The round with this order, in which a piece is issued only after all before it."""
        issue = list(accumulate((self.members[member].ready for member, _, _ in order), max))
        sent, now = self._with_messages(issue)._send(list(zip(issue, order, strict=True)))
        messages = [message for _, message in sent]
        updates, period = self._forward(messages, now)
        return CyclicPlan(tuple(order), tuple(issue), tuple(updates), period)

    def _with_messages(self, issue: Sequence[int]) -> _Loop:
        """The loop in which each block also hands over what is issued after it."""
        if not self.message:
            return self
        backward = list(self.backward)
        for block in issue:
            backward[block] += self.message
        return replace(self, backward=backward)

    def _send(self, ranked: Sequence[tuple[int, tuple[int, int, int]]]) -> tuple[list[tuple[int, _Message]], float]:
        """The backward: (rank, message) in send order, and when its last block ends.

        ranked: (index of the backward block that releases it, piece). Whenever the stream is free, the released
        piece of the lowest rank goes.
        """
        released: list[list[int]] = [[] for _ in self.backward]
        for rank, (block, _) in enumerate(ranked):
            released[block].append(rank)
        sent: list[tuple[int, _Message]] = []
        waiting: list[int] = []
        now = free = 0.0
        speed = 1.0

        def send(start: float) -> None:
            nonlocal free, speed
            rank = heappop(waiting)
            member, begin, end = ranked[rank][1]
            seconds = _seconds(end - begin, self.alpha, self.beta, self.host)
            speed = max(0.0, 1.0 - self.host * (end - begin) / seconds) if seconds else 1.0
            free = start + seconds
            sent.append((rank, _Message(member, start, free, speed)))

        for block, work in enumerate(self.backward):
            while work > 0:
                if free <= now:
                    if not waiting:
                        now += work
                        break
                    send(now)
                elif work <= (free - now) * speed:
                    now = min(free, now + work / speed)
                    break
                else:
                    work -= (free - now) * speed
                    now = free
            for rank in released[block]:
                heappush(waiting, rank)
        while waiting:
            send(max(free, now))
        return sent, now

    def _forward(self, messages: Sequence[_Message], now: float) -> tuple[list[tuple[int, int]], float]:
        """(member, block before which its update runs) in the order of execution, and when the last block ends."""
        arrival = [0.0] * len(self.members)
        for message in messages:
            arrival[message.member] = message.end
        coming = sorted(range(len(self.members)), key=lambda index: (arrival[index], index))
        needed: list[int] = [0] * len(self.forward)
        for member in self.members:
            needed[member.need] += 1
        updates: list[tuple[int, int]] = []
        arrived: list[tuple[int, float, int]] = []
        compute = _Compute(messages if self.host else ())
        reached = 0
        for block, work in enumerate(self.forward):
            while True:
                while reached < len(coming) and arrival[coming[reached]] <= now:
                    index = coming[reached]
                    heappush(arrived, (self.members[index].need, arrival[index], index))
                    reached += 1
                if not needed[block]:
                    break
                if not arrived:
                    now = arrival[coming[reached]]
                    continue
                need, _, index = heappop(arrived)
                needed[need] -= 1
                updates.append((index, block))
                now = compute.run(now, self.members[index].update)
            now = compute.run(now, work)
        return updates, now


class _Compute:
    """Compute that is slower while messages are on their way. It is asked in the order of time."""

    def __init__(self, messages: Sequence[_Message]) -> None:
        self.messages = messages
        self.next = 0

    def run(self, now: float, work: float) -> float:
        """When `work` seconds of compute, begun now, have been done."""
        while work > 0 and self.next < len(self.messages):
            message = self.messages[self.next]
            if message.end <= now:
                self.next += 1
            elif now < message.start:
                step = min(work, message.start - now)
                now = message.start if step < work else now + step
                work -= step
            elif work <= (message.end - now) * message.speed:
                return min(message.end, now + work / message.speed)
            else:
                work -= (message.end - now) * message.speed
                now = message.end
        return now + max(work, 0.0)


# Checks -------------------------------------------------------------------------------------------------------------


def _check(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigTypeError(f"{name} is {value!r}; pass a number")
    if not 0 <= value < inf:
        raise ConfigValueError(f"{name} is {value!r}; pass a finite number of at least 0")


def _check_each(name: str, values: Sequence[float]) -> None:
    for index, value in enumerate(values):
        _check(f"{name}[{index}]", value)


def _check_same_length(name: str, values: Sequence[float], other: str, others: Sequence[float]) -> None:
    if len(values) != len(others):
        raise ConfigValueError(f"{name} has {len(values)} entries and {other} {len(others)}; pass one per member")


def _check_cyclic(
    forward: Sequence[float],
    backward: Sequence[float],
    members: Sequence[CyclicMember],
    alpha: float,
    beta: float,
    host: float,
) -> None:
    _check_each("forward", forward)
    _check_each("backward", backward)
    for name, value in (("alpha", alpha), ("beta", beta), ("host", host)):
        _check(name, value)
    for index, member in enumerate(members):
        if not isinstance(member.nbytes, int):
            raise ConfigTypeError(f"members[{index}].nbytes is {member.nbytes!r}; pass a whole number of bytes")
        _check(f"members[{index}].nbytes", member.nbytes)
        _check(f"members[{index}].update", member.update)
        for field, block, blocks in (("ready", member.ready, backward), ("need", member.need, forward)):
            if not isinstance(block, int) or not 0 <= block < len(blocks):
                side = "backward" if field == "ready" else "forward"
                raise ConfigValueError(
                    f"members[{index}].{field} is {block!r}; pass the index of one of the {len(blocks)} {side} blocks"
                )
