"""Sizes of buckets and pieces for a loop whose transfers run on into the next step's forward, each with its plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.solvers.buckets.cyclic import CyclicMember, CyclicPlan, check_cyclic, cyclic_plans

PIECES = tuple(int(mebibytes * 2**20) for mebibytes in (0.5, 1, 2, 4, 8, 16, 32))
"""Sizes in bytes that `piece_choices` tries."""

_MUCH_LATER = 0.25
"""How much later than the one before it the forward has to need a member that begins another row, in parts of the
forward: far more than one layer takes, and less than the way from the first layers to the last."""


@dataclass(frozen=True)
class PieceChoice:
    """A piece choice is a plan with the sizes that led to it.

    piece: bytes, None when nothing is cut.
    groups: which of the given members form each member of the plan.
    """

    piece: int | None
    groups: tuple[tuple[int, ...], ...]
    plan: CyclicPlan


def piece_choices(
    forward: Sequence[float],
    backward: Sequence[float],
    members: Sequence[CyclicMember],
    alpha: float,
    beta: float,
    host: float = 0.0,
    message: float = 0.0,
    *,
    pieces: Sequence[int] = PIECES,
    merges: Sequence[int] = PIECES,
) -> Iterator[tuple[PieceChoice, list[CyclicMember]]]:
    """Plans over sizes of pieces, and over merges of the members; each with the merged members that it refers to.

    pieces: sizes in bytes to try, besides not cutting. merges: sizes in bytes; for each one, members that follow
    each other in order of readiness are merged until they have that size (a merged member is ready with its last
    part, needed with its first, and updated as a whole); () keeps the members as they are, which is always tried. Where
    members are ready last and needed late (`_turn`), merges that stop there are tried too.
    Fewer merges come first, then larger pieces; one order is tried once. The other arguments and the errors are those
    of `cyclic_plans`.
    """
    check_cyclic(forward, backward, members, alpha, beta, host)
    for name, given in (("pieces", pieces), ("merges", merges)):
        if not all(isinstance(size, int) and size > 0 for size in given):
            raise ConfigValueError(f"{name} is {given!r}; pass positive numbers of bytes")
    seen: dict[tuple[tuple[int, ...], ...], None] = {}
    by_ready = sorted(range(len(members)), key=lambda index: members[index].ready)
    turn = _turn(forward, members, by_ready)
    for limit, closed in product((0, *sorted(merges)), (0, turn) if turn else (0,)):
        groups = (*_groups(members, by_ready[:closed], limit), *_groups(members, by_ready[closed:], limit))
        if groups in seen:
            continue
        seen[groups] = None
        merged = [merged_member([members[index] for index in group]) for group in groups]
        largest = max((member.nbytes for member in merged), default=0)
        orders: dict[tuple[tuple[int, int, int], ...], None] = {}
        for piece in (None, *sorted((size for size in pieces if size < largest), reverse=True)):
            for plan in cyclic_plans(forward, backward, merged, alpha, beta, piece, host, message):
                if plan.order not in orders:
                    orders[plan.order] = None
                    yield PieceChoice(piece, groups, plan), merged


def _turn(forward: Sequence[float], members: Sequence[CyclicMember], by_ready: Sequence[int]) -> int:
    """Where, in order of readiness, members begin that the forward needs much later than the one before; 0: nowhere.

    Gradients become ready in the reverse order of need, but for those whose computation was put off to the end.
    """
    clock = list(accumulate(forward, initial=0.0))
    rises = [clock[members[j].need] - clock[members[i].need] for i, j in pairwise(by_ready)]
    highest = max(rises, default=0.0)
    return rises.index(highest) + 1 if highest > _MUCH_LATER * clock[-1] else 0


def _groups(members: Sequence[CyclicMember], by_ready: Sequence[int], limit: int) -> tuple[tuple[int, ...], ...]:
    groups: list[tuple[int, ...]] = []
    group: list[int] = []
    size = 0
    for index in by_ready:
        group.append(index)
        size += members[index].nbytes
        if size >= limit:
            groups.append(tuple(group))
            group, size = [], 0
    if group:
        groups.append(tuple(group))
    return tuple(groups)


def merged_member(parts: Sequence[CyclicMember]) -> CyclicMember:
    """One bucket of these: ready with its last part, needed with its first, updated as a whole."""
    return CyclicMember(
        sum(part.nbytes for part in parts),
        max(part.ready for part in parts),
        min(part.need for part in parts),
        sum(part.update for part in parts),
    )
