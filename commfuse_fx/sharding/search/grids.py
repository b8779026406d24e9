"""Grids of mesh axes that ranks can be: what a search may choose where the user has given no mesh."""

from __future__ import annotations

MOST_AXES = 3
"""Axes of a grid: each takes a search and a division of the graph."""

INNER = 3
"""Grids of two axes."""


def grids(ranks: int, inner: int = 1) -> list[tuple[int, ...]]:
    """Sizes of axes, the outermost first.

    Of two axes the inner one is a group of neighbours with the fastest links, or a half of it, and so on. Of three, the
    outermost one is that of such groups.

    inner: how many neighbours have the fastest links. 1, or all ranks: all have the same.
    """
    near = inner if 1 < inner < ranks and ranks % inner == 0 else ranks
    found: list[tuple[int, ...]] = []
    size = near
    while size > 1 and len(found) < INNER:
        if size < ranks:
            found.append((ranks // size, size))
        size //= _least_factor(size)
    small = _factors(near, MOST_AXES if near == ranks else MOST_AXES - 1)
    if len(small) > 1:
        small = small if near == ranks else (ranks // near, *small)
        if small not in found:
            found.append(small)
    return found


def _factors(number: int, most: int) -> tuple[int, ...]:
    """Prime factors, the smallest ones joined until there are so many; the largest first."""
    found: list[int] = []
    while number > 1:
        found.append(_least_factor(number))
        number //= found[-1]
    while len(found) > most:
        first, second, *others = found
        found = sorted((first * second, *others))
    return tuple(reversed(found))


def _least_factor(number: int) -> int:
    return next((each for each in range(2, int(number**0.5) + 1) if number % each == 0), number)
