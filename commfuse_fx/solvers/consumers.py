"""Which collectives of one key to merge, and in which order to send them, when each result has its own consumer.

Numbers only, as in `solvers.cuts`. Sources: MG-WFBP (Shi et al. 2019) for merging; for sending what is needed first, P3
(Jayarajan et al., "Priority-based parameter propagation for distributed DNN training", MLSys 2019) and ByteScheduler
(Peng et al., "A generic communication scheduler for distributed DNN training acceleration", SOSP 2019).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from commfuse_fx.cost.numbers import EQUAL, check_time, check_times
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.solvers.cuts import optimal_cuts

_EXACT_MOST = 12  # The exact search looks at 3**n pairs of subsets.
_TRIED = 5  # From how many of the constructive plans the local search starts.
_WORK = 400_000  # How many messages the local search may simulate: a bound that no clock decides.

Item = tuple[str, float]
"""Of a compute program: ("run", seconds), ("ready", member) or ("need", member)."""


@dataclass(frozen=True)
class BucketPlan:
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
    program = _Program(items, sizes, alpha, beta, merge)
    starts = sorted(_starts(program), key=lambda plan: (program.finish(plan), len(plan)))
    found = min(
        (_improve(program, start, _WORK // _TRIED) for start in _different(starts)[:_TRIED]),
        key=lambda plan: (program.finish(plan), len(plan)),
    )
    if len(sizes) <= exact_limit:
        found = _exact(program, found)
    return program.plan(found)


def starting_plans(items: Sequence[Item], sizes: Sequence[float], alpha: float, beta: float) -> tuple[BucketPlan, ...]:
    """The constructive plans from which the search of `optimal_plan` starts, all legal; its arguments.

    No fusion; the cuts of `optimal_cuts`; everything that may be merged with its neighbours; one bucket per point of
    need; and for a ladder of sizes, the neighbours in order of readiness or of need cut by size and sent in order of
    readiness or earliest need first.
    """
    program = _Program(items, sizes, alpha, beta)
    return tuple(program.plan(plan) for plan in _starts(program))


class _Program:
    """A checked compute program: where each member is ready and first needed, and the compute time up to there."""

    def __init__(
        self, items: Sequence[Item], sizes: Sequence[float], alpha: float, beta: float, merge: bool = True
    ) -> None:
        check_time("alpha", alpha)
        check_time("beta", beta)
        check_times("sizes", sizes)
        self.items = tuple(items)
        self.sizes = tuple(sizes)
        self.alpha = alpha
        self.beta = beta
        self.merge = merge
        self.clock: list[float] = []
        self.ready: list[int] = [-1] * len(sizes)
        self.need: list[int] = [-1] * len(sizes)
        now = 0.0
        for position, (kind, value) in enumerate(self.items):
            self.clock.append(now)
            if kind == "run":
                check_time(f"items[{position}]", value)
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

    def plan(self, buckets: Sequence[_Bucket]) -> BucketPlan:
        return BucketPlan(tuple(bucket.members for bucket in buckets), self.finish(buckets))

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
    if not program.merge:
        return plan
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
            if not program.merge and part & (part - 1):  # more than one member
                part = (part - 1) & left
                continue
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
