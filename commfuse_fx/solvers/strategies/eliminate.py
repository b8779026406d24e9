"""The cheapest choice in a graph of variables with costs, found exactly.

A state goes that another state of its variable beats whatever the neighbours do. Then one variable after the other is
folded into its neighbours, by the best of its states for each choice of theirs: first those with few neighbours, and
of the others the one whose neighbours have the fewest choices. In the end their best states are read off backwards.

Source: variables with up to two neighbours are the reductions of Scholz and Eckstein, "Register allocation for
irregular architectures" (LCTES 2002); more is bucket elimination, Dechter, "Bucket elimination: a unifying framework
for reasoning" (Artificial Intelligence 113, 1999); dominated states are those of Goldstein, "Efficient rotamer
elimination applied to protein side-chains and related spin glasses" (Biophysical Journal 66, 1994).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from commfuse_fx.solvers.strategies.cost_tables import CostTables, Scope
from commfuse_fx.solvers.strategies.factor_graph import FactorGraph, Table
from commfuse_fx.solvers.strategies.shared_tables import SharedTables

WIDE = 1 << 12
"""Entries of a table before which it is worth to look for dominated states again."""


class NoChoiceError(ValueError):
    """Every choice is forbidden."""


class TooWideError(ValueError):
    """Folding the rest of the variables would need a table of `entries`."""

    def __init__(self, entries: int) -> None:
        super().__init__(f"a table of {entries} entries")
        self.entries = entries


@dataclass(frozen=True)
class _Folded:
    """A variable that is gone.

    best: its best state for each choice of the variables in `scope`. kept: the states that it had left. near: those of
        the variables in `scope`, of which some may go later.
    """

    variable: int
    scope: Scope
    best: NDArray[np.intp]
    kept: NDArray[np.intp]
    near: tuple[NDArray[np.intp], ...]


_FIRST = np.zeros((), np.intp)
"""The best state of a variable that has no other."""


class Elimination:
    """What is left of a graph while variables are folded.

    unary, tables: the costs of the variables that are left. around: the tables of each of them.
    kept: the states of each variable that are left, as the graph numbers them.
    largest: entries of the largest table so far.
    fallback: states of the graph's variables, which some of them get where tables would become too large.
    """

    def __init__(self, graph: FactorGraph, fallback: Sequence[int] = ()) -> None:
        given = CostTables(graph, fallback)
        self._count = len(graph.unary)
        self._fallback = given.states
        self.unary: dict[int, Table] = dict(enumerate(given.unary))
        self.kept = [np.arange(len(table)) for table in given.unary]
        self.tables: dict[Scope, Table] = {}
        self.around: dict[int, dict[Scope, None]] = {number: {} for number in self.unary}
        self.largest = 0
        self._folded: list[_Folded] = []
        self._shared = SharedTables(WIDE)
        self._near: dict[int, set[int]] = {number: set() for number in self.unary}
        self._counts = [len(table) for table in given.unary]  # of states
        distinct = {id(table): table for table in (*given.unary, *given.together.values())}
        ones = {key: self._shared.one(table) for key, table in distinct.items()}
        for number, table in self.unary.items():
            self.unary[number] = ones[id(table)]
        for scope, table in given.together.items():
            self._add(scope, ones[id(table)])
        for number in [number for number, table in self.unary.items() if len(table) == 1]:
            self._settle(number)

    # Folding

    def fold_all(self, largest: int) -> None:
        """Fold all variables, those first whose neighbours have the fewest choices.

        Before it makes a table of more than `largest` entries it leaves the neighbour with the most choices its state
        of the fallback alone. Without a fallback it raises TooWideError. Raises NoChoiceError if every choice is
        forbidden.
        """
        sizes = {number: self._size(number) for number in self.unary}
        heap = [(size, number) for number, size in sizes.items()]
        heapq.heapify(heap)
        looked_at = inf
        while heap:
            size, number = heapq.heappop(heap)
            if number not in self.unary or size != sizes[number]:
                continue
            if size > WIDE and size < looked_at and not self._fallback:
                looked_at = size  # until what is left has become wider still, a second look finds nothing
                if changed := self.drop_dominated():
                    looked_at = inf
                    for other in [*changed, number]:
                        for each in (other, *self._neighbours(other)) if other in self.unary else ():
                            sizes[each] = self._size(each)
                            heapq.heappush(heap, (sizes[each], each))
                    continue
            if size > largest:
                if not self._fallback:
                    raise TooWideError(size)
                near = self._fix(number)
            else:
                near = self.fold(number)
            for other in near:
                new = self._size(other)
                if new != sizes[other]:
                    sizes[other] = new
                    heapq.heappush(heap, (new, other))

    def fold(self, number: int) -> Scope:
        """Fold a variable into its neighbours, and return them."""
        scopes = list(self.around[number])
        scope = self._neighbours(number)
        table, best = self._best(number, scope, scopes)
        for each in scopes:
            self._take_off(each)
        self._leave(number)
        for other in scope:
            near = self._near[other]
            near.update(scope)
            near.discard(other)
        self._folded.append(_Folded(number, scope, best, self.kept[number], tuple(self.kept[each] for each in scope)))
        self.largest = max(self.largest, table.size)
        if not scope:
            if table == inf:
                raise NoChoiceError("every choice is forbidden")
        else:
            self._add(scope, table)
        return scope

    def _fix(self, number: int) -> Scope:
        """Leave a neighbour its state of the fallback alone. Returns the variables that have seen more of it."""
        most = max(self._neighbours(number), key=lambda other: (len(self.unary[other]), -other))
        near = self._neighbours(most)
        at = int(np.searchsorted(self.kept[most], self._fallback[most]))
        self._keep(most, [min(at, len(self.kept[most]) - 1)])
        self._settle(most)
        return near

    def _settle(self, number: int) -> None:
        """Take a variable with a single state out of the tables that it is in."""
        for scope in list(self.around[number]):
            table = self._take_off(scope)
            rest = tuple(other for other in scope if other != number)
            self._add(rest, table.take([0], axis=scope.index(number)).squeeze(scope.index(number)))
        if self.unary[number][0] == inf:
            raise NoChoiceError(f"every state of variable {number} is forbidden")
        self._leave(number)
        self._folded.append(_Folded(number, (), _FIRST, self.kept[number], ()))

    def _best(self, number: int, scope: Scope, scopes: Sequence[Scope]) -> tuple[Table, NDArray[np.intp]]:
        """The least cost and the best state of a variable for each choice of the variables in `scope`."""
        at = {each: axis for axis, each in enumerate((number, *scope))}
        given = [self.unary[number], *(self.tables[each] for each in scopes)]
        places = ((0,), *(tuple(at[one] for one in each) for each in scopes))
        return self._shared.least(given, places)

    def states(self) -> tuple[int, ...]:
        """The best state of each variable, as the graph numbers them."""
        found: dict[int, int] = {}
        for each in reversed(self._folded):
            places = (
                int(np.searchsorted(kept, found[other])) for other, kept in zip(each.scope, each.near, strict=True)
            )
            found[each.variable] = int(each.kept[each.best[tuple(places)]])
        return tuple(found[number] for number in range(self._count))

    # Dominated states

    def drop_dominated(self) -> list[int]:
        """Drop states that others beat, until no more are found. Returns the variables around which something has
        changed, those without a choice among them, which go."""
        changed: dict[int, None] = {}
        pending = dict.fromkeys(self.unary)
        while pending:
            number = next(iter(pending))
            del pending[number]
            left = self._undominated(number)
            if len(left) == len(self.unary[number]):
                continue
            near = dict.fromkeys(self._neighbours(number))
            changed[number] = None
            self._keep(number, left)
            if len(left) == 1:
                self._settle(number)
                changed |= near
            pending |= near
        return list(changed)

    def _undominated(self, number: int) -> list[int]:
        costs = self.unary[number]
        if np.minimum.reduce(costs) == inf:
            raise NoChoiceError(f"every state of variable {number} is forbidden")
        if len(costs) == 1:
            return [0]
        tables = [costs, *(self.tables[scope] for scope in self.around[number])]
        axes = (0, *(scope.index(number) for scope in self.around[number]))
        return self._shared.unbeaten(tables, axes)

    def _keep(self, number: int, left: Sequence[int]) -> None:
        self.kept[number] = self.kept[number][left]
        self._counts[number] = len(left)
        self.unary[number] = self._shared.one(self.unary[number][left])
        for scope in self.around[number]:
            self.tables[scope] = self._shared.one(self.tables[scope].take(left, axis=scope.index(number)))

    # Tables

    def _add(self, scope: Scope, table: Table) -> None:
        """Add a table to the costs of these variables."""
        if len(scope) == 1:
            self.unary[scope[0]] = self._shared.total(self.unary[scope[0]], table)
            return
        known = self.tables.get(scope)
        if known is None:
            self.tables[scope] = self._shared.one(table)
            for number in scope:
                self.around[number][scope] = None
                self._near[number].update(scope)
                self._near[number].discard(number)
        else:
            self.tables[scope] = self._shared.total(known, table)

    def _take_off(self, scope: Scope) -> Table:
        """Take a table away."""
        for number in scope:
            del self.around[number][scope]
        return self.tables.pop(scope)

    def _leave(self, number: int) -> None:
        """Take a variable away that no table has any more."""
        del self.unary[number], self.around[number]
        for other in self._near.pop(number):
            self._near[other].discard(number)

    def _neighbours(self, number: int) -> Scope:
        return tuple(sorted(self._near[number]))

    def _size(self, number: int) -> int:
        """Entries of the table that folding a variable leaves; 0 where it leaves none."""
        near = self._near[number]
        return prod(map(self._counts.__getitem__, near)) if len(near) > 1 else 0
