"""The cheapest ways from layouts on several mesh axes to others, as sequences of collectives and cuts.

On each axis a tensor lies as it did, whole, or as it is wanted. A move changes one axis, gathers several together, or
sums over several together, so that each rank gets its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import inf

import numpy as np
from numpy.typing import NDArray

from commfuse_fx.ir.core.placement import P, Placement, R, Shard
from commfuse_fx.sharding.search.placement_costs import PlacementCosts
from commfuse_fx.solvers.strategies.factor_graph import Table

Placements = tuple[Placement, ...]
"""How a tensor lies: a placement for each axis, in their order, of which the first divides a dimension first."""

Prices = Mapping[tuple[int, ...], PlacementCosts]
"""Prices of changes on some of the axes together, by their places."""

HAVE, WHOLE, WANTED = range(3)
"""How far an axis has come."""

Stages = tuple[int, ...]
"""How far each axis has come."""


def cheapest_ways(
    have: Sequence[Placements],
    wanted: Sequence[Placements],
    prices: Prices,
    nbytes_of: Callable[[Placements], float],
    fused: bool,
) -> Table:
    """Seconds from each layout to each of those that are wanted, by the cheapest sequence of moves; infinity if there
    is none.

    nbytes_of: the bytes of a part in a layout; infinity if the tensor cannot lie so.
    fused: whether collectives are sent with others.
    """
    moves = _Moves([*have, *wanted], prices, nbytes_of, fused)
    begin, end = moves.numbers(have), moves.numbers(wanted)
    at = [(one[:, None], np.zeros((1, 1), np.intp), other[None, :]) for one, other in zip(begin, end, strict=True)]
    goal = (WANTED,) * len(at)
    order = sorted(product((WANTED, WHOLE, HAVE), repeat=len(at)), key=sum, reverse=True)
    left = {stages: np.full((1, 1), inf) for stages in order}  # seconds that are left, by how far each axis has come
    left[goal] = np.zeros((1, 1))
    further = {stages: [*moves.further(stages, at)] for stages in order[1:]}
    changed = {goal}
    while changed:  # a gather may take an axis along that has come to its end, and is cut once more
        before, changed = changed, set[Stages]()
        for stages, own in further.items():
            best = left[stages]
            for seconds, after in own:
                if after in before or after in changed:
                    best = np.minimum(best, seconds + left[after])
            if not np.array_equal(best, left[stages]):
                left[stages] = best
                changed.add(stages)
    return np.broadcast_to(left[(HAVE,) * len(at)], (len(have), len(wanted)))


class _Moves:
    """What each move costs in each layout of a tensor; infinity where it cannot be made. Placements are numbered on
    each axis, 0 is R.

    cuts: for each axis, from a layout to another placement there than R. gathers: of some axes together, to R.
    sums: of some axes together, on all of which a tensor is a partial sum and gets the same parts.
    """

    def __init__(
        self,
        layouts: Sequence[Placements],
        prices: Prices,
        nbytes_of: Callable[[Placements], float],
        fused: bool,
    ) -> None:
        self._own = [dict.fromkeys((R, *own)) for own in zip(*layouts, strict=True)]
        for own in self._own:
            own |= {placement: number for number, placement in enumerate(own)}
        self._shape = tuple(len(own) for own in self._own)
        self._prices, self._fused = prices, fused
        self._nbytes = np.array([nbytes_of(layout) for layout in product(*self._own)]).reshape(self._shape)
        dims = [[each.dim if isinstance(each, Shard) else -1 for each in own] for own in self._own]
        self._dims = [self._along(axis, np.array(own)) for axis, own in enumerate(dims)]
        self.cuts = [self._cuts(axis) for axis in range(len(self._own))]
        self.gathers = {places: self._gathers(places) for places in prices}
        self.sums = {places: self._sums(places) for places in prices if len(places) > 1}

    def numbers(self, layouts: Sequence[Placements]) -> NDArray[np.intp]:
        """The numbers of placements, as [axes, layouts]."""
        rows = zip(self._own, zip(*layouts, strict=True), strict=True)
        return np.array([[own[each] for each in placements] for own, placements in rows], dtype=np.intp)

    def further(self, stages: Stages, at: Sequence[Sequence[NDArray[np.intp]]]) -> Iterator[tuple[Table, Stages]]:
        """The seconds of each move, with the stages after it. at: the numbers of placements on each axis, by stage."""
        layout = tuple(numbers[stage] for numbers, stage in zip(at, stages, strict=True))
        for axis, stage in enumerate(stages):
            if stage != WANTED:
                goal = at[axis][WANTED]
                seconds = np.where(layout[axis] == goal, 0.0, self.cuts[axis][(*layout, goal)])
                yield seconds, _with(stages, (axis,), WANTED)
        for places, costs in self.gathers.items():
            if all(stages[axis] != WHOLE for axis in places):
                yield costs[layout], _with(stages, places, WHOLE)
        for places, costs in self.sums.items():
            if all(stages[axis] == HAVE for axis in places):
                first, *others = places
                goal = at[first][WANTED]
                seconds = costs[(*layout, goal)]
                for axis in others:
                    seconds = np.where(self._as_on(first, axis)[at[axis][WANTED]] == goal, seconds, inf)
                yield seconds, _with(stages, places, WANTED)

    def _along(self, axis: int, values: NDArray[np.intp]) -> NDArray[np.intp]:
        return values.reshape([-1 if at == axis else 1 for at in range(len(self._own))])

    def _cuts(self, axis: int) -> Table:
        """[layout, placement that the axis gets]"""
        own = [*self._own[axis]]
        others, which = self._others((axis,))
        seconds = np.full((len(others), len(own), len(own)), inf)
        for number, nbytes in enumerate(others):
            for one, have in enumerate(own):
                for other, wanted in enumerate(own[1:], 1):
                    if nbytes < inf and have != wanted:
                        seconds[number, one, other] = self._seconds((axis,), nbytes, have, wanted)
        here = self._along(axis, np.arange(len(own)))[..., None]
        found = seconds[which[..., None], here, np.arange(len(own))]
        fits = np.expand_dims(np.moveaxis(self._nbytes, axis, -1), axis) < inf  # as the layout is after the move
        blocked = self._is_divided_later((axis,), self._dims[axis])[..., None]
        blocked = blocked | self._is_divided_later((axis,), self._dims[axis].reshape(-1), True)
        return np.where(fits & ~blocked, found, inf)

    def _gathers(self, places: tuple[int, ...]) -> Table:
        """[layout]"""
        first = places[0]
        others, which = self._others(places)
        seconds = np.full((len(others), self._shape[first]), inf)
        for number, nbytes in enumerate(others):
            for one, have in enumerate(self._own[first]):
                is_one = isinstance(have, Shard) and have.blocks > 1
                if nbytes < inf and have != R and not (is_one and len(places) > 1):
                    seconds[number, one] = self._seconds(places, nbytes, have, R)
        found = seconds[which, self._along(first, np.arange(self._shape[first]))]
        alike = np.ones((1,) * len(self._own), dtype=np.bool_)
        for axis in places[1:]:
            same = self._along(axis, self._as_on(first, axis))
            alike = alike & (same == self._along(first, np.arange(self._shape[first])))
        return np.where(alike & ~self._is_divided_later(places, self._dims[first]), found, inf)

    def _sums(self, places: tuple[int, ...]) -> Table:
        """[layout, placement that all of these axes get, by its number on the first]"""
        is_sum = np.ones((1,) * len(self._own), dtype=np.bool_)
        for axis in places:
            is_sum = is_sum & (self._along(axis, np.array([each == P for each in self._own[axis]], np.intp)) == 1)
        others, which = self._others(places)
        first = self._own[places[0]]
        found = np.full((*self._shape, len(first)), inf)
        for number, wanted in enumerate(first):
            numbers = [self._own[axis].get(wanted) for axis in places]
            if isinstance(wanted, Shard) and wanted.blocks == 1 and None not in numbers:
                seconds = [self._seconds(places, nbytes, P, wanted) if nbytes < inf else inf for nbytes in others]
                after = self._nbytes
                for axis, own in zip(places, numbers, strict=True):
                    after = after.take(np.array([own], dtype=np.intp), axis=axis)
                dim = np.full((1,) * len(self._own), wanted.dim)
                is_possible = is_sum & (after < inf) & ~self._is_divided_later(places, dim)
                found[..., number] = np.where(is_possible, np.array(seconds)[which], inf)
        return found

    def _as_on(self, first: int, axis: int) -> NDArray[np.intp]:
        """The numbers that the placements of an axis have on the first one; -1 where it does not have them."""
        return np.array([self._own[first].get(each, -1) for each in self._own[axis]], dtype=np.intp)

    def _seconds(self, places: tuple[int, ...], nbytes: float, have: Placement, wanted: Placement) -> float:
        return self._prices[places].change(nbytes, have, wanted, self._fused)

    def _others(self, places: Sequence[int]) -> tuple[list[float], NDArray[np.intp]]:
        """The bytes that a tensor has which is whole on some axes, and by layout which of them it has."""
        nbytes = self._nbytes
        for axis in places:
            nbytes = nbytes.take([0], axis=axis)
        found, which = np.unique(nbytes, return_inverse=True)
        return found.tolist(), np.broadcast_to(which.reshape(nbytes.shape), self._shape)

    def _is_divided_later(
        self, places: tuple[int, ...], dims: NDArray[np.intp], is_last: bool = False
    ) -> NDArray[np.bool_]:
        """Whether a later axis divides the parts of a dimension further: then an axis cannot change how it divides it.

        dims: by layout, or as a last dimension more.
        """
        found = np.zeros((1,) * (len(self._own) + is_last), dtype=np.bool_)
        for axis in range(places[0] + 1, len(self._own)):
            if axis not in places:
                later = self._dims[axis][..., None] if is_last else self._dims[axis]
                found = found | ((later == dims) & (dims >= 0))
        return found


def _with(stages: Stages, places: tuple[int, ...], stage: int) -> Stages:
    return tuple(stage if axis in places else each for axis, each in enumerate(stages))
