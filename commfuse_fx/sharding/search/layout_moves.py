"""The cheapest way from one layout on several mesh axes to another, as a sequence of collectives and cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import combinations, count
from math import inf

from commfuse_fx.ir.placement import Placement, R, Shard
from commfuse_fx.sharding.search.placement_costs import PlacementCosts

Placements = tuple[Placement, ...]
"""How a tensor lies: a placement for each axis, in their order, of which the first divides a dimension first."""

Prices = Mapping[tuple[int, ...], PlacementCosts]
"""Prices of changes on some of the axes together, by their places."""


def cheapest_way(
    have: Placements, wanted: Placements, prices: Prices, nbytes_of: Callable[[Placements], float], fused: bool
) -> float:
    """Seconds of the cheapest sequence of moves; infinity if there is none.

    nbytes_of: the bytes of a part in a layout; infinity if the tensor cannot lie so.
    fused: whether collectives are sent with others.
    """
    seconds = {have: 0.0}
    turn = count()
    ahead: list[tuple[float, int, Placements]] = [(0.0, next(turn), have)]
    while ahead:
        now, _, layout = heappop(ahead)
        if layout == wanted:
            return now
        if now > seconds[layout]:
            continue
        for places, after, others in _moves(layout, wanted, tuple(prices)):
            if nbytes_of(after) == inf:
                continue
            first = places[0]
            then = now + prices[places].change(nbytes_of(others), layout[first], after[first], fused)
            if then < seconds.get(after, inf):
                seconds[after] = then
                heappush(ahead, (then, next(turn), after))
    return inf


Move = tuple[tuple[int, ...], Placements, Placements]
"""The axes that a move changes together, the layout after it, and how the tensor lies meanwhile on other axes."""


@lru_cache(maxsize=1 << 16)
def _moves(layout: Placements, wanted: Placements, groups: Sequence[tuple[int, ...]]) -> Sequence[Move]:
    """The moves from a layout on the way to another one. groups: the axes that a sum or a gather may be over."""
    found = _changes(layout, wanted, groups)
    return [
        (places, after, tuple(R if at in places else each for at, each in enumerate(layout))) for places, after in found
    ]


def _changes(
    layout: Placements, wanted: Placements, groups: Sequence[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], Placements]]:
    for at, (one, other) in enumerate(zip(layout, wanted, strict=True)):
        if one != other and other != R and _may_move(layout, (at,), one, other):
            yield (at,), _with(layout, (at,), other)
    for placement in dict.fromkeys(layout):
        if placement == R:
            continue
        holders = [at for at, each in enumerate(layout) if each == placement]
        is_one = isinstance(placement, Shard) and placement.blocks > 1
        for number in range(1, 2 if is_one else len(holders) + 1):
            for places in combinations(holders, number):
                if places in groups and _may_move(layout, places, placement):
                    yield places, _with(layout, places, R)


def _may_move(layout: Placements, places: tuple[int, ...], *placements: Placement) -> bool:
    """An axis can only change how it divides a dimension if no later axis divides its parts further."""
    dims = {each.dim for each in placements if isinstance(each, Shard)}
    later = (each for at, each in enumerate(layout) if at > places[0] and at not in places)
    return not any(isinstance(each, Shard) and each.dim in dims for each in later)


def _with(layout: Placements, places: tuple[int, ...], placement: Placement) -> Placements:
    return tuple(placement if at in places else each for at, each in enumerate(layout))
