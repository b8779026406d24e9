"""Common subsequences of long sequences of keys."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Hashable, Sequence

# Beyond so many insertions and deletions between two anchors, an exact answer costs more than it is worth.
_MOST_EDITS = 300


def increasing(values: Sequence[int]) -> list[int]:
    """Positions of a longest increasing subsequence of distinct values. O(n log n), by patience sorting."""
    tails: list[int] = []
    ends: list[int] = []
    previous = [-1] * len(values)
    for i, value in enumerate(values):
        pile = bisect_left(tails, value)
        previous[i] = ends[pile - 1] if pile else -1
        tails[pile : pile + 1] = [value]
        ends[pile : pile + 1] = [i]
    found: list[int] = []
    at = ends[-1] if ends else -1
    while at >= 0:
        found.append(at)
        at = previous[at]
    return found[::-1]


def common(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Positions (in a, in b) of equal keys, ascending in both: a long common subsequence.

    Keys that both have once are anchors (patience diff); between them Myers' O((n + m) d) algorithm decides (An O(ND)
    Difference Algorithm and Its Variations, 1986), and where d is large, the first of equal keys is taken.
    """
    found: list[tuple[int, int]] = []
    todo = [(0, len(a), 0, len(b))]
    while todo:
        low, high, start, end = todo.pop()
        while low < high and start < end and a[low] == b[start]:
            found.append((low, start))
            low, start = low + 1, start + 1
        while low < high and start < end and a[high - 1] == b[end - 1]:
            high, end = high - 1, end - 1
            found.append((high, end))
        if low == high or start == end:
            continue
        anchors = _anchors(a, b, low, high, start, end)
        if not anchors:
            found.extend((low + i, start + j) for i, j in _myers(a[low:high], b[start:end]))
            continue
        found.extend(anchors)
        for i, j in anchors:
            todo.append((low, i, start, j))
            low, start = i + 1, j + 1
        todo.append((low, high, start, end))
    return sorted(found)


def _anchors(
    a: Sequence[Hashable], b: Sequence[Hashable], low: int, high: int, start: int, end: int
) -> list[tuple[int, int]]:
    once = Counter(a[low:high])
    place = {key: j for j, key in enumerate(b[start:end], start)}
    twice = {key for key, count in Counter(b[start:end]).items() if count > 1}
    pairs = [
        (i, place[key])
        for i, key in enumerate(a[low:high], low)
        if once[key] == 1 and key in place and key not in twice
    ]
    return [pairs[k] for k in increasing([j for _, j in pairs])]


def _myers(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    n, m = len(a), len(b)
    reach = {1: 0}
    history: list[dict[int, int]] = []
    for edits in range(min(n + m, _MOST_EDITS) + 1):
        history.append(dict(reach))
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and reach[k - 1] < reach[k + 1])
            x = reach[k + 1] if down else reach[k - 1] + 1
            while x < n and x - k < m and a[x] == b[x - k]:
                x += 1
            reach[k] = x
            if x >= n and x - k >= m:
                return _trace(history, n, m)
    return _greedy(a, b)


def _trace(history: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for edits in range(len(history) - 1, -1, -1):
        reach, k = history[edits], x - y
        down = k == -edits or (k != edits and reach[k - 1] < reach[k + 1])
        before = k + 1 if down else k - 1
        left = reach[before] if edits else 0
        top = left - before if edits else 0
        while x > left and y > top:
            x, y = x - 1, y - 1
            found.append((x, y))
        x, y = left, top
    return found


def _greedy(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    places: dict[Hashable, deque[int]] = {}
    for i, key in enumerate(a):
        places.setdefault(key, deque()).append(i)
    pairs = [(places[key].popleft(), j) for j, key in enumerate(b) if places.get(key)]
    return [pairs[k] for k in increasing([i for i, _ in pairs])]
