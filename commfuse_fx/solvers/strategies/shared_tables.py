"""Tables of costs of which equal ones are one object, and what is worked out of them, once for equal ones.

Blocks of a model that are alike have equal tables. What is worked out for one of them holds for all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import inf, prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from commfuse_fx.solvers.strategies.factor_graph import Table

Axes = tuple[int, ...]
"""Places of dimensions."""

FoundT = TypeVar("FoundT")


class SharedTables:
    """Keeps tables, and results by the ids of tables that it keeps. Both live as long as it does.

    largest: entries of the largest table that is kept.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._same: dict[tuple[object, ...], Table] = {}
        self._kept: dict[int, Table] = {}  # by id
        self._results: dict[tuple[object, ...], Any] = {}

    def one(self, table: Table) -> Table:
        """The table less its least entry, which no choice depends on; equal tables are one object."""
        if id(table) in self._kept:
            return table
        least = np.minimum.reduce(table, axis=None)
        one = table if least in (0.0, inf) else table - least
        if one.size > self._largest:
            return one
        one = np.ascontiguousarray(one)
        one = self._same.setdefault((one.shape, one.tobytes()), one)
        self._kept[id(one)] = one
        return one

    def total(self, *tables: Table) -> Table:
        """The sum of tables of the same variables, as `one` gives it."""
        return self._once(SharedTables._total, tables)

    def least(self, tables: Sequence[Table], places: tuple[Axes, ...]) -> tuple[Table, NDArray[np.intp]]:
        """The least sum of tables over dimension 0 of the sum, as `one` gives it, and where it stands.

        places: where the dimensions of each table are in the sum. They rise, but for that which is dimension 0.
        """
        return self._once(SharedTables._least, tables, places)

    def unbeaten(self, tables: Sequence[Table], axes: Axes) -> list[int]:
        """The states of a variable that no other one beats, whatever its neighbours do.

        tables: all that the variable is in. axes: its dimension in each of them.
        """
        return self._once(SharedTables._unbeaten, tables, axes)

    def _once(self, work: Callable[..., FoundT], tables: Sequence[Table], *more: Hashable) -> FoundT:
        """What `work` returns, called once for the same arguments if all of the tables are kept."""
        ids = tuple(map(id, tables))
        if not all(each in self._kept for each in ids):
            return work(self, tables, *more)
        key = (work, ids, more)
        if key not in self._results:
            self._results[key] = work(self, tables, *more)
        found: FoundT = self._results[key]
        return found

    def _total(self, tables: Sequence[Table]) -> Table:
        return self.one(_sum(tables))

    def _least(self, tables: Sequence[Table], places: Sequence[Axes]) -> tuple[Table, NDArray[np.intp]]:
        count = 1 + max(map(max, places))
        spread = [_spread(table, axes, count) for table, axes in zip(tables, places, strict=True)]
        entries = prod(np.broadcast_shapes(*(table.shape[1:] for table in spread)))
        least, best = _least(spread) if entries <= self._largest else _least_by_state(spread)
        return self.one(least), best

    def _unbeaten(self, tables: Sequence[Table], axes: Axes) -> list[int]:
        with np.errstate(invalid="ignore"):
            more = [self._once(SharedTables._more, [table], axis) for table, axis in zip(tables, axes, strict=True)]
            beaten = _sum(more) <= 0  # nor is a number that is none
        np.fill_diagonal(beaten, False)
        left = list(range(len(beaten)))
        if beaten.any():
            by = beaten.tolist()
            for state in reversed(range(len(beaten))):
                if any(by[state][other] for other in left):
                    left.remove(state)
        return left

    def _more(self, tables: Sequence[Table], axis: int) -> Table:
        """What state b of a variable costs more at the most than state a, at [a, b]; axis: that of the variable."""
        (table,) = tables
        rows = _with_first(table, axis).reshape(table.shape[axis], -1)
        # A pair that is forbidden either way holds nothing against either state.
        more: Table = np.fmax.reduce(rows[None, :, :] - rows[:, None, :], axis=-1, initial=-inf)
        return more


def _spread(table: Table, axes: Axes, count: int) -> Table:
    """The table with its dimensions at these places of `count`, which rise but for one that is 0."""
    shape = [1] * count
    for axis, size in zip(axes, table.shape, strict=True):
        shape[axis] = size
    return _with_first(table, axes.index(0)).reshape(shape)


def _with_first(table: Table, axis: int) -> Table:
    """The table with this dimension before all others."""
    return table.transpose(axis, *(other for other in range(table.ndim) if other != axis)) if axis else table


def _least(tables: Sequence[Table]) -> tuple[Table, NDArray[np.intp]]:
    """The least sum over the first dimension, and where it stands."""
    total = _sum(tables)
    return np.minimum.reduce(total, axis=0), total.argmin(axis=0)


def _least_by_state(tables: Sequence[Table]) -> tuple[Table, NDArray[np.intp]]:
    """The same where there are many sums: those of one state at a time."""
    least = _sum([table[0] for table in tables])
    best = np.zeros(least.shape, np.intp)
    for state in range(1, len(tables[0])):
        total = _sum([table[state] for table in tables])
        np.copyto(best, state, where=total < least)
        np.minimum(least, total, out=least)
    return least, best


def _sum(tables: Sequence[Table]) -> Table:
    first, *others = tables
    for table in others:
        first = first + table
    return first
