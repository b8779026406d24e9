"""What tests of planning share: numbers to draw, and all plans of a few members."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from hypothesis import strategies as st

# Small whole numbers: sums of them are exact, and ties and zeros are frequent.
small = st.integers(0, 12).map(float)
alphas = st.sampled_from([0.0, 1.0, 3.0, 1000.0])


def close(value: float) -> float:
    """The most that still counts as this value."""
    return value * (1 + 1e-8)


def contiguous(count: int) -> Iterator[list[tuple[int, int]]]:
    """All cuts of a sequence."""
    for mask in range(1 << max(count - 1, 0)):
        edges = [0, *(i + 1 for i in range(count - 1) if mask >> i & 1), count]
        yield list(pairwise(edges))


def ordered_partitions(members: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """All partitions of the members, in all orders."""
    if not members:
        yield []
        return
    for mask in range(1, 1 << len(members)):
        first = tuple(m for i, m in enumerate(members) if mask >> i & 1)
        for rest in ordered_partitions([m for i, m in enumerate(members) if not mask >> i & 1]):
            yield [first, *rest]
