"""Which gradients to merge where the next step's forward goes on while they are on the wire."""

from __future__ import annotations

from collections.abc import Sequence

from commfuse_fx.solvers.cut_moves import Ranges, adjusted, joined, ranges_of
from commfuse_fx.solvers.cyclic import CyclicMember
from commfuse_fx.solvers.loop import Loop
from commfuse_fx.solvers.piece_choices import PIECES, merged_member, piece_choices

MOST_MEMBERS = 512
"""Above this many collectives of one key, neighbours are merged until so many are left, before the search begins."""

MANY_MEMBERS = 96
"""Above this many fewer sizes of buckets and pieces are tried."""

FEW_BYTES = 4 << 20
"""Up to so many bytes in all, halves and thirds of them are tried too: the sizes above are too coarse for them."""

FEW_MEMBERS = 24
"""Up to so many collectives boundaries between buckets are moved across steps, too."""

SEVERAL_MEMBERS, FEW_BUCKETS = 256, 64
"""Up to so many collectives, in up to so many buckets, neighbouring buckets are joined across steps, too."""


def cyclic_buckets(
    loop: Loop, members: Sequence[CyclicMember], alpha: float, beta: float, host: float
) -> tuple[list[list[int]], float]:
    """The members of each bucket, by index, and the seconds that a step takes with them.

    Each bucket after the first is one more update. alpha, beta and host are those of `piece_choices`.
    """
    coarse = _coarse(members)
    merged = [merged_member([members[i] for i in group]) for group in coarse]
    total = sum(member.nbytes for member in members)
    prices = alpha, beta, host, loop.message + loop.update
    merges = PIECES if len(merged) <= MANY_MEMBERS else PIECES[:2] + PIECES[3::3]
    if total <= FEW_BYTES:
        merges = (*merges, *(-(-total // parts) for parts in (2, 3)))
    pieces = PIECES if len(merged) <= MANY_MEMBERS else PIECES[2::3]
    choice, period = loop.best(
        piece_choices(loop.forward, loop.backward, merged, *prices, pieces=pieces, merges=merges)
    )
    parts = choice.groups

    def judged(cuts: Ranges, pieces: Sequence[int]) -> float:
        buckets = [merged_member(merged[begin:end]) for begin, end in cuts]
        return loop.best(piece_choices(loop.forward, loop.backward, buckets, *prices, pieces=pieces, merges=()))[1]

    if len(merged) <= FEW_MEMBERS:
        period, cuts = adjusted(period, ranges_of(parts), lambda cuts: judged(cuts, pieces))
        parts = tuple(tuple(range(begin, end)) for begin, end in cuts)
    elif len(merged) <= SEVERAL_MEMBERS and len(parts) <= FEW_BUCKETS:
        # Buckets of one size are larger than they may be in one place, and smaller than they could be in another.
        same = () if choice.piece is None else (choice.piece,)
        period, cuts = joined(period, ranges_of(parts), lambda cuts: judged(cuts, same))
        parts = tuple(tuple(range(begin, end)) for begin, end in cuts)
    return [[i for part in group for i in coarse[part]] for group in parts], period


def _coarse(members: Sequence[CyclicMember]) -> list[list[int]]:
    """Neighbours together, so that at most MOST_MEMBERS groups are left."""
    if len(members) <= MOST_MEMBERS:
        return [[i] for i in range(len(members))]
    limit = sum(member.nbytes for member in members) / MOST_MEMBERS * 2
    groups: list[list[int]] = [[]]
    size = 0
    for i, member in enumerate(members):
        if groups[-1] and size + member.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(i)
        size += member.nbytes
    return groups
