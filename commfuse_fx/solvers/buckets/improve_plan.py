"""A local search among plans: which buckets to merge, swap, move or split so that the program ends sooner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from commfuse_fx.cost.numbers import EQUAL
from commfuse_fx.solvers.buckets.compute_program import ComputeProgram, SentBucket


def improve_plan(program: ComputeProgram, plan: list[SentBucket], work: int) -> list[SentBucket]:
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


def _around(program: ComputeProgram, plan: list[SentBucket], chain: Sequence[int]) -> Iterator[list[SentBucket]]:
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


def _merged(program: ComputeProgram, plan: list[SentBucket], first: int, last: int) -> list[SentBucket]:
    """The plan with the pairs (i, i + 1), first <= i < last, merged that can be, each bucket in one pair at most."""
    if not program.merge:
        return plan
    made: list[SentBucket] = []
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


def _shifted(program: ComputeProgram, plan: list[SentBucket], left: int) -> Iterator[list[SentBucket]]:
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
