"""Grids of mesh axes that ranks can be: what a search may choose where the user has given no mesh."""

from __future__ import annotations

MOST = 3
"""Grids: each takes a search, and a plan of the step."""


def grids(ranks: int, near: int) -> list[tuple[int, int]]:
    """Sizes of two axes, the outer one first. The inner one is a group of neighbours with the fastest links, or a half
    of it, and so on. There are none where all ranks have the same links.

    near: how many neighbours have the fastest links.
    """
    if not 1 < near < ranks or ranks % near:
        return []
    found: list[tuple[int, int]] = []
    size = near
    while size > 1 and len(found) < MOST:
        found.append((ranks // size, size))
        size //= _least_factor(size)
    return found


def _least_factor(number: int) -> int:
    return next((each for each in range(2, int(number**0.5) + 1) if number % each == 0), number)
