"""Cuts of a row of collectives into buckets of neighbours, and the cuts that are one step away from one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

from commfuse_fx.cost.numbers import EQUAL

Ranges = tuple[tuple[int, int], ...]
"""Buckets of neighbours: [begin, end) of collectives in order of readiness."""


def cut_by_size(sizes: Sequence[int], threshold: int) -> Ranges:
    """Neighbours together until they have so many bytes."""
    edges = [0]
    filled = 0
    for i, size in enumerate(sizes, start=1):
        filled += size
        if filled >= threshold or i == len(sizes):
            edges.append(i)
            filled = 0
    return tuple(pairwise(edges))


def ranges_of(groups: Sequence[Sequence[object]]) -> Ranges:
    """Groups of neighbours as ranges."""
    edges = list(accumulate(map(len, groups), initial=0))
    return tuple(pairwise(edges))


def moved_cuts(cuts: Ranges) -> Iterator[Ranges]:
    """The cuts with one boundary elsewhere or left out, from the last one on."""
    for i in range(len(cuts) - 1, 0, -1):
        (first, edge), (_, last) = cuts[i - 1], cuts[i]
        yield (*cuts[: i - 1], (first, last), *cuts[i + 1 :])
        for distance in (1, -1, 4, -4):
            if first < edge + distance < last:
                yield (*cuts[: i - 1], (first, edge + distance), (edge + distance, last), *cuts[i + 1 :])


def _split(cuts: Ranges) -> Iterator[Ranges]:
    """The cuts with one boundary more, from the first on."""
    for i, (begin, end) in enumerate(cuts):
        for edge in range(begin + 1, end):
            yield (*cuts[:i], (begin, edge), (edge, end), *cuts[i + 1 :])


def adjusted(seconds: float, cuts: Ranges, judged: Callable[[Ranges], float], moves: int) -> tuple[float, Ranges]:
    """The cuts with boundaries moved, left out or put in as long as that helps, with so many moves at most, and what
    they take."""
    tried = {cuts: seconds}
    while True:
        for other in (*moved_cuts(cuts), *_split(cuts)):
            if len(tried) > moves:
                return seconds, cuts
            if other not in tried:
                tried[other] = judged(other)
                if tried[other] < seconds * (1 - EQUAL):
                    seconds, cuts = tried[other], other
                    break
        else:
            return seconds, cuts


def joined(seconds: float, cuts: Ranges, judged: Callable[[Ranges], float], moves: int) -> tuple[float, Ranges]:
    """The cuts with boundaries left out where that helps, looking twice at each, with so many moves at most, and what
    they take."""
    for _ in range(2):
        i = len(cuts) - 1
        while i > 0 and moves > 0:
            moves -= 1
            (first, _), (_, last) = cuts[i - 1], cuts[i]
            other = (*cuts[: i - 1], (first, last), *cuts[i + 1 :])
            if (found := judged(other)) < seconds * (1 - EQUAL):
                seconds, cuts = found, other
            i = min(i, len(cuts)) - 1
    return seconds, cuts
