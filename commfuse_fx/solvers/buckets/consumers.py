"""Which collectives of one key to merge, and in which order to send them, when each result has its own consumer.

Numbers only, as in `solvers.cuts`. Sources: MG-WFBP (Shi et al. 2019) for merging; for sending what is needed first, P3
(Jayarajan et al., "Priority-based parameter propagation for distributed DNN training", MLSys 2019) and ByteScheduler
(Peng et al., "A generic communication scheduler for distributed DNN training acceleration", SOSP 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.solvers.buckets.compute_program import BucketPlan, ComputeProgram, Item, SentBucket
from commfuse_fx.solvers.buckets.cuts import optimal_cuts
from commfuse_fx.solvers.buckets.exact_plan import exact_plan
from commfuse_fx.solvers.buckets.improve_plan import improve_plan

_EXACT_MOST = 12  # The exact search looks at 3**n pairs of subsets.
_TRIED = 5  # From how many of the constructive plans the local search starts.
_WORK = 400_000  # How many messages the local search may simulate: a bound that no clock decides.


def optimal_plan(
    items: Sequence[Item],
    sizes: Sequence[float],
    alpha: float,
    beta: float,
    exact_limit: int = 8,
    merge: bool = True,
) -> BucketPlan:
    """Buckets and their order on one stream, so that the compute program ends first.

    The arguments are those of `simulate_plan`. Each member has one "ready" and, after it, at least one "need"; only
    the first counts. Members merge legally when all are ready before the first of them is needed. merge: False for the
    best order of members as they are, each a message of its own.

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
    program = ComputeProgram(items, sizes, alpha, beta, merge)
    starts = sorted(_starts(program), key=lambda plan: (program.finish(plan), len(plan)))
    found = min(
        (improve_plan(program, start, _WORK // _TRIED) for start in _different(starts)[:_TRIED]),
        key=lambda plan: (program.finish(plan), len(plan)),
    )
    if len(sizes) <= exact_limit:
        found = exact_plan(program, found)
    return program.plan(found)


def starting_plans(items: Sequence[Item], sizes: Sequence[float], alpha: float, beta: float) -> tuple[BucketPlan, ...]:
    """The constructive plans from which the search of `optimal_plan` starts, all legal; its arguments.

    No fusion; the cuts of `optimal_cuts`; everything that may be merged with its neighbours; one bucket per point of
    need; and for a ladder of sizes, the neighbours in order of readiness or of need cut by size and sent in order of
    readiness or earliest need first.
    """
    program = ComputeProgram(items, sizes, alpha, beta)
    return tuple(program.plan(plan) for plan in _starts(program))


def _cut(program: ComputeProgram, sequence: Sequence[int], limit: float) -> list[SentBucket]:
    """Neighbours of the sequence in buckets of at most `limit` bytes, as far as they merge legally."""
    buckets: list[SentBucket] = []
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


def _starts(program: ComputeProgram) -> list[list[SentBucket]]:
    members = range(len(program.sizes))
    by_ready = sorted(members, key=program.ready.__getitem__)
    by_need = sorted(members, key=program.need.__getitem__)
    starts = [[program.bucket([member]) for member in by_ready]]
    if not program.merge:
        starts.append(_earliest_need_first(program, starts[0]))
        return starts
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


def _different(plans: Sequence[list[SentBucket]]) -> list[list[SentBucket]]:
    return [plan for index, plan in enumerate(plans) if index == 0 or plan != plans[index - 1]]


def _earliest_need_first(program: ComputeProgram, buckets: Sequence[SentBucket]) -> list[SentBucket]:
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
