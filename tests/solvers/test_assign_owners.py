"""Owners of items: balanced, and the same wherever they are computed."""

from __future__ import annotations

from itertools import product

import pytest

from commfuse_fx.solvers.buckets.assign_owners import assign_owners


@pytest.mark.parametrize(
    ("sizes", "ranks", "owners"),
    [
        ([], 3, []),
        ([5, 5, 5], 3, [0, 1, 2]),
        ([1, 8, 3, 3], 2, [1, 0, 1, 1]),
        ([7, 6, 5, 4, 3], 1, [0] * 5),
        ([3, 3], 4, [0, 1]),
        ([0, 0, 0], 2, [0, 0, 0]),
    ],
)
def test_the_largest_first_and_each_to_the_rank_that_has_least(sizes: list[int], ranks: int, owners: list[int]) -> None:
    assert assign_owners(sizes, ranks) == owners


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_rank_gets_more_than_4_thirds_of_what_it_has_to(ranks: int) -> None:
    for sizes in product((1, 2, 3, 5, 7), repeat=5):
        best = min(most(sizes, owners, ranks) for owners in product(range(ranks), repeat=5))
        assert most(sizes, assign_owners(sizes, ranks), ranks) <= 4 / 3 * best


def most(sizes: tuple[int, ...], owners: object, ranks: int) -> int:
    return max(sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks))
