"""What one compute stream does, and the buckets that it sends and waits for: how long the program takes with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from commfuse_fx.cost.numbers import check_time, check_times
from commfuse_fx.errors import ConfigValueError

Item = tuple[str, float]
"""Of a compute program: ("run", seconds), ("ready", member) or ("need", member)."""


@dataclass(frozen=True)
class BucketPlan:
    """A bucket plan says what is sent together, and when all is done.

    buckets: the members of each, in send order.
    finish: seconds until the compute program ends.
    """

    buckets: tuple[tuple[int, ...], ...]
    finish: float


class SentBucket(NamedTuple):
    """Its members in the order of readiness; positions in the program of the last "ready" and the first "need"."""

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
    program = ComputeProgram(items, sizes, alpha, beta)
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


class ComputeProgram:
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

    def bucket(self, members: Sequence[int]) -> SentBucket:
        ordered = tuple(sorted(members, key=self.ready.__getitem__))
        seconds = self.alpha + self.beta * sum(self.sizes[member] for member in ordered)
        return SentBucket(ordered, self.ready[ordered[-1]], min(self.need[member] for member in ordered), seconds)

    def plan(self, buckets: Sequence[SentBucket]) -> BucketPlan:
        return BucketPlan(tuple(bucket.members for bucket in buckets), self.finish(buckets))

    def finish(self, buckets: Sequence[SentBucket]) -> float:
        """The end of the program as `simulate_plan` finds it, in O(buckets * log buckets); inf for an illegal plan."""
        return self.trace(buckets)[0]

    def trace(self, buckets: Sequence[SentBucket]) -> tuple[float, list[int]]:
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
