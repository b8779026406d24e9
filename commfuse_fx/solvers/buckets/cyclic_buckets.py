"""Which gradients to merge where the next step's forward goes on while they are on the wire."""

from __future__ import annotations

from collections.abc import Sequence

from commfuse_fx.solvers.buckets.cut_moves import Ranges, adjusted, joined, ranges_of
from commfuse_fx.solvers.buckets.cyclic import CyclicMember
from commfuse_fx.solvers.buckets.loop import Loop
from commfuse_fx.solvers.buckets.piece_choices import PIECES, merged_member, piece_choices
from commfuse_fx.solvers.effort import EFFORT

COARSE_MERGES, COARSE_PIECES = PIECES[::3], PIECES[2::3]
"""Sizes of buckets, and sizes of pieces between them, that are tried where there is no time for all of `PIECES`."""

ORDERS = 3
"""Plans of one size of buckets and one of pieces: sent by readiness, by need, and by need in pieces."""


def cyclic_buckets(
    loop: Loop, members: Sequence[CyclicMember], alpha: float, beta: float, host: float
) -> tuple[list[list[int]], float]:
    """The members of each bucket, by index, and the seconds that a step takes with them.

    Each bucket after the first is one more update. alpha, beta and host are those of `piece_choices`.
    """
    coarse = _coarse(members, EFFORT.node_plays // _plans(COARSE_MERGES, COARSE_PIECES))
    merged = [merged_member([members[i] for i in group]) for group in coarse]
    prices = alpha, beta, host, loop.message + loop.update
    merges, pieces = (PIECES, PIECES) if affords_all_sizes(len(merged)) else (COARSE_MERGES, COARSE_PIECES)
    merges = _merges(merges, sum(member.nbytes for member in members))
    choice, period = loop.best(
        piece_choices(loop.forward, loop.backward, merged, *prices, pieces=pieces, merges=merges)
    )
    parts = choice.groups

    def judged(cuts: Ranges, pieces: Sequence[int]) -> float:
        buckets = [merged_member(merged[begin:end]) for begin, end in cuts]
        return loop.best(piece_choices(loop.forward, loop.backward, buckets, *prices, pieces=pieces, merges=()))[1]

    # Each move makes plans of every size of pieces. There should be time to look at every place of a boundary.
    moves = EFFORT.plans(len(merged) * ORDERS * (len(pieces) + 1))
    if moves >= len(merged):
        period, cuts = adjusted(period, ranges_of(parts), lambda cuts: judged(cuts, pieces), moves)
    else:
        # Buckets of one size are larger than they may be in one place, and smaller than they could be in another.
        same = () if choice.piece is None else (choice.piece,)
        moves = EFFORT.plans(len(merged) * ORDERS * (len(same) + 1))
        period, cuts = joined(period, ranges_of(parts), lambda cuts: judged(cuts, same), moves)
    parts = tuple(tuple(range(begin, end)) for begin, end in cuts)
    return [[i for part in group for i in coarse[part]] for group in parts], period


def affords_all_sizes(members: int) -> bool:
    """Whether there is time for all sizes of buckets and pieces."""
    return EFFORT.plans(members) >= _plans(PIECES, PIECES)


def _plans(merges: Sequence[int], pieces: Sequence[int]) -> int:
    """Plans of one loop: of each size of buckets with each of pieces, and of neither."""
    return ORDERS * (len(merges) + 1) * (len(pieces) + 1)


def _merges(sizes: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Sizes of buckets. Where two of them are more than all there is, halves and thirds of it stand in for these."""
    if sum(size >= total for size in sizes) < 2:
        return sizes
    return (*(size for size in sizes if size < total), *(-(-total // parts) for parts in (1, 2, 3)))


def _coarse(members: Sequence[CyclicMember], most: int) -> list[list[int]]:
    """Neighbours together, so that at most so many groups are left."""
    if len(members) <= most:
        return [[i] for i in range(len(members))]
    limit = sum(member.nbytes for member in members) / most * 2
    groups: list[list[int]] = [[]]
    size = 0
    for i, member in enumerate(members):
        if groups[-1] and size + member.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(i)
        size += member.nbytes
    return groups
