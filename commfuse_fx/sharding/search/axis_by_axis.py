"""Strategies on several mesh axes, of which one has a choice at a time.

Why: docs/decisions.md, "Several axes, one at a time, begin from several strategies".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from math import prod

from commfuse_fx.ir.core.placement import Placement
from commfuse_fx.sharding.dividing.axis import Axis, Pin
from commfuse_fx.sharding.search.axis_search import AxisSearch, Budget, Found

NEARLY = 0.01
"""A proven gap that is small enough."""

LESS = 1 - 1e-9
"""What counts as less: at most this part."""

EXACT = "elimination"
"""The solver of choices that are the cheapest ones."""

SOLVER = "one axis at a time"
"""What notes call this search."""


def together(search: AxisSearch, axes: Sequence[Axis], budget: Budget | None = None) -> Found:
    """The cheapest strategies on all axes together.

    Where that is not nearly proven, those of one axis at a time are taken if they are cheaper.
    """
    found = search.cheapest(axes, budget)
    if len(axes) == 1 or found.gap is None or found.gap <= NEARLY:
        return found
    other = axis_by_axis(search, axes, budget)
    if other.cost >= found.cost or (budget is not None and other.nbytes > found.nbytes):
        return found
    return replace(other, gap=1 - found.cost * (1 - found.gap) / other.cost)


def axis_by_axis(search: AxisSearch, axes: Sequence[Axis], budget: Budget | None = None) -> Found:
    """Strategies that no other choice on a single axis makes cheaper.

    Each axis is solved exactly, with those before it fixed. Then each is solved again, with all others fixed, until
    nothing gets cheaper. There are several beginnings, of which the cheapest result is taken; one where tables are too
    large to solve an axis exactly.

    budget: what memory may be taken, for each axis as it is solved first. Nothing later takes more. Then there is one
        beginning, as results that take different amounts of memory cannot be compared.
    """
    order = [axis.group for axis in search.fastest_first(axes)]
    free = {axis.group: axis for axis in axes}
    if budget is not None:
        start = _in_turn(search, free, order, budget)
        return replace(_descended(search, free, order, start, True), solver=SOLVER, gap=None)
    known: list[Found] = []
    for start in _beginnings(search, free, order):
        if not any(_costs_the_same(start, each) for each in known):
            known += [start, _descended(search, free, order, start, False)]
        if start.solver != EXACT:  # another search would take seconds
            break
    best = known[0]
    for each in known:
        best = each if each.cost < best.cost * LESS else best
    return replace(best, solver=SOLVER, gap=None)


def _beginnings(search: AxisSearch, free: Mapping[str, Axis], order: Sequence[str]) -> Iterator[Found]:
    """The fastest links first, and the slowest ones first; and all axes as one.

    While some axes are solved, the others seem to repeat all work. So it also counts as many times as there are ranks,
    lest it is repeated on all axes to save a little communication.
    """
    ranks = prod(axis.ways for axis in free.values())
    for work in (1.0, float(ranks)):
        for each in (order, order[::-1]):
            found = _in_turn(search.with_work(work), free, each)
            yield found if work == 1 else search.cheapest(found.axes)
    axes = [*free.values()]
    if _are_alike(axes):
        yield _as_one(search, axes)


def _costs_the_same(one: Found, other: Found) -> bool:
    return LESS * one.cost <= other.cost <= one.cost / LESS and one.nbytes == other.nbytes


def _are_alike(axes: Sequence[Axis]) -> bool:
    """Whether the same is fixed on all of them."""

    def placements(pins: Mapping[str, Pin]) -> dict[str, Placement]:
        return {name: pin.placement for name, pin in pins.items()}

    fixed = [(axis.inputs, placements(axis.parameters), placements(axis.activations)) for axis in axes]
    return all(each == fixed[0] for each in fixed)


def _as_one(search: AxisSearch, axes: Sequence[Axis]) -> Found:
    """All axes divide alike."""
    one = replace(axes[0], group=",".join(axis.group for axis in axes), ways=prod(axis.ways for axis in axes))
    (found,) = search.cheapest([one]).axes
    return search.cheapest([replace(found, group=axis.group, ways=axis.ways) for axis in axes])


def _in_turn(search: AxisSearch, free: Mapping[str, Axis], order: Sequence[str], budget: Budget | None = None) -> Found:
    """Each axis with those before it fixed."""
    decided: dict[str, Axis] = {}
    for group in order:
        taken = [decided.get(name, axis) for name, axis in free.items() if name in decided or name == group]
        found = search.cheapest(taken, budget, [decided.get(name, axis) for name, axis in free.items()])
        decided = {axis.group: axis for axis in found.axes}
    return found


def _descended(
    search: AxisSearch, free: Mapping[str, Axis], order: Sequence[str], found: Found, is_limited: bool
) -> Found:
    """Each axis again, with all others fixed. is_limited: memory may not grow."""
    settled = 0  # how many axes in a row have no cheaper choice
    for group in cycle(order):
        if settled == len(order):
            break
        axes = [free[group] if axis.group == group else axis for axis in found.axes]
        most = found.nbytes / LESS
        again = search.cheapest(axes, (lambda *_, most=most: most) if is_limited else None)
        is_better = again.cost < found.cost * LESS and (again.nbytes <= most or not is_limited)
        found, settled = (again, 1) if is_better else (found, settled + 1)
    return found
