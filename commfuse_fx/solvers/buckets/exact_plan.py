"""The best plan of few members, over all ways to merge them and all orders."""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from typing import NamedTuple

from commfuse_fx.solvers.buckets.compute_program import ComputeProgram, SentBucket


class _Label(NamedTuple):
    """A way to have sent some members: when the stream is free, and how late compute is at each point of need."""

    free: float
    late: tuple[float, ...]
    messages: int
    sent: tuple[int, ...]


def exact_plan(program: ComputeProgram, incumbent: list[SentBucket]) -> list[SentBucket]:
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
    bucket = [SentBucket((), -1, len(program.items), 0.0)]
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


def _rest(program: ComputeProgram, left: SentBucket) -> float:
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
