"""What fusion has made of the collectives: before and after, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commfuse_fx.ir.core.meta import CollectiveInfo, info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.planning.compiled import Snapshot

FUSE = "fuse_collectives"
"""The pass whose work is shown."""


@dataclass(frozen=True)
class Unfused:
    """One collective before fusion. bytes: payload; None where nothing says it."""

    kind: str
    group: str
    bytes: int | None
    members: tuple[str, ...]


@dataclass(frozen=True)
class Fusion:
    """What fusion has made of which collectives.

    stage: the pass after which `before` was taken; "" where it was derived from the members of the final ones.
    before: all collectives before fusion.
    parts: for each final collective the positions in `before` of those that it stands for.
    gone: positions of those that no final collective stands for.
    """

    stage: str
    before: tuple[Unfused, ...]
    parts: tuple[tuple[int, ...], ...]
    gone: tuple[int, ...]


def fusion(program: Program, stages: Mapping[str, Snapshot]) -> Fusion:
    """Align the collectives of the final graph with those before they were fused."""
    final = [details for node in program.collectives() if (details := info(node).collective) is not None]
    stage = _stage_before(stages)
    earlier = stages[stage].collectives if stage else ()
    if final and not earlier:
        return _derived(program, final)
    return _aligned(stage, earlier, final)


def _stage_before(stages: Mapping[str, Snapshot]) -> str:
    names = list(stages)
    place = names.index(FUSE) if FUSE in names else 0
    return names[place - 1] if place else ""


def _aligned(stage: str, earlier: Sequence[CollectiveInfo], final: Sequence[CollectiveInfo]) -> Fusion:
    waiting: dict[tuple[str, str, str], list[int]] = {}
    for number, each in enumerate(earlier):
        waiting.setdefault((each.kind, each.group, each.members[0]), []).append(number)
    parts = []
    for each in final:
        found = []
        for member in each.members:
            numbers = waiting.get((each.kind, each.group, member))
            if numbers:
                found.append(numbers.pop(0))
        parts.append(tuple(found))
    taken = {number for found in parts for number in found}
    before = tuple(Unfused(each.kind, each.group, each.nbytes, each.members) for each in earlier)
    return Fusion(stage, before, tuple(parts), tuple(n for n in range(len(before)) if n not in taken))


def _derived(program: Program, final: Sequence[CollectiveInfo]) -> Fusion:
    before: list[Unfused] = []
    parts = []
    for each in final:
        first = len(before)
        if len(each.members) == 1:
            before.append(Unfused(each.kind, each.group, each.nbytes, each.members))
        else:
            before.extend(
                Unfused(each.kind, each.group, _member_bytes(program, name, each), (name,)) for name in each.members
            )
        parts.append(tuple(range(first, len(before))))
    return Fusion("", tuple(before), tuple(parts), ())


def _member_bytes(program: Program, name: str, collective: CollectiveInfo) -> int | None:
    param = program.params.get(name)
    return None if param is None else param.spec.numel * collective.dtype.itemsize
