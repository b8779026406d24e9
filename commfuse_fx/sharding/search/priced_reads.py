"""What those who read a value pay for changes of its layout, worked out once for all values that are read alike."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commfuse_fx.ir.core.meta import TensorSpec
from commfuse_fx.ir.core.placement import P
from commfuse_fx.sharding.search.axis_grid import AxisGrid, LaidOut
from commfuse_fx.sharding.search.exposure import PARAMETER
from commfuse_fx.sharding.search.layout_moves import Placements
from commfuse_fx.solvers.strategies.cheapest_choice import Choice
from commfuse_fx.solvers.strategies.factor_graph import Table

Needs = tuple[tuple[Placements, ...], ...]
"""The placements in which each state of a variable needs a value."""


@dataclass
class LayoutReader:
    """Who reads a value: a variable, and what each of its states needs. phase: when it reads."""

    variable: int
    wanted: Needs
    phase: str
    fused: bool = False


@dataclass
class LayoutRead:
    """A value: result number `item` of a variable, with those who read it.

    times: how often a change of it counts. is_parameter: whether it is there before anything is computed.
    """

    variable: int
    item: int
    spec: TensorSpec
    readers: list[LayoutReader] = field(default_factory=list)
    times: float = 1.0
    is_parameter: bool = False


@dataclass(frozen=True)
class SharedChange:
    """A change of layout that several readers may need, and that is paid for once.

    readers: their numbers among those of the value, each with whether each of its states needs it.
    paid: what it costs in each state of the value. stays: the bytes of a copy that the backward still needs; None:
        there is none.
    """

    readers: Sequence[tuple[int, NDArray[np.bool_]]]
    paid: Table
    stays: Table | None


@dataclass(frozen=True)
class PricedRead:
    """own: what each reader pays by itself, as [states of the value, its states]. shared: what is paid for once."""

    own: Sequence[Table]
    shared: Sequence[SharedChange]


class KnownLayouts:
    """What searches of one compile find out again and again. Equal lists and tuples that it has made are one object.

    calls: the states of a call and their costs. reads: what is paid for a value that is read in a certain way.
    updates: what updates of a parameter cost in its layouts.
    """

    def __init__(self) -> None:
        self.calls: dict[Hashable, tuple[list[LaidOut], Table]] = {}
        self.reads: dict[Hashable, PricedRead] = {}
        self.updates: dict[Hashable, Table] = {}
        self._choices: dict[tuple[int, ...], list[Choice]] = {}
        self._states: dict[tuple[LaidOut, ...], list[LaidOut]] = {}
        self._columns: dict[tuple[int, str, tuple[int, ...]], Needs] = {}
        self._same: dict[Any, Any] = {}

    def states(self, states: list[LaidOut]) -> list[LaidOut]:
        return self._states.setdefault(tuple(states), states)

    def choices_of(self, states: Sequence[list[LaidOut]]) -> list[Choice]:
        """The choices that have been found for variables with these states, for more to be added. states: lists that
        `states` has returned."""
        return self._choices.setdefault(tuple(map(id, states)), [])

    def columns(self, states: list[LaidOut], part: str, places: tuple[int, ...]) -> Needs:
        """For each state, the placements at these places of its "inputs" or "outputs", each once. states: a list that
        `states` has returned."""
        key = (id(states), part, places)
        found = self._columns.get(key)
        if found is None:
            rows = (getattr(state, part) for state in states)
            made = tuple(tuple(dict.fromkeys(row[place] for place in places)) for row in rows)
            found = self._columns[key] = self._same.setdefault(made, made)
        return found


def price_read(read: LayoutRead, have: Needs, grid: AxisGrid, known: KnownLayouts) -> PricedRead:
    """What is paid for a value. have: its placement in each state of its variable, from `known`."""
    fused = all(reader.fused for reader in read.readers)
    if not fused:
        is_forward = any(reader.phase == "forward" for reader in read.readers)
        grid = grid.of(PARAMETER if read.is_parameter else "forward" if is_forward else "backward")
    readers = tuple((id(reader.wanted), reader.phase) for reader in read.readers)
    key = (grid.key(fused), read.spec, read.times, id(have), fused, readers)
    found = known.reads.get(key)
    if found is None:
        found = known.reads[key] = _priced(read, have, grid, fused)
    return found


def _priced(read: LayoutRead, have: Needs, grid: AxisGrid, fused: bool) -> PricedRead:
    counts: dict[Placements, int] = {}
    for reader in read.readers:
        for each in dict.fromkeys(each for needs in reader.wanted for each in needs):
            counts[each] = counts.get(each, 0) + 1
    layouts = {one: at for at, one in enumerate(dict.fromkeys(one for (one,) in have))}
    table = read.times * grid.changes(read.spec, [*layouts], [*counts], fused)
    rows = [layouts[one] for (one,) in have]
    changes = {each: table[rows, at] for at, each in enumerate(counts)}
    if len(read.readers) > 1:  # a partial sum that several ops use is summed once, before them
        for each, costs in changes.items():
            costs[[any(one == each[at] == P for at, one in enumerate(placements)) for (placements,) in have]] = inf
    shared = [each for each, costs in changes.items() if counts[each] > 1 and (costs[np.isfinite(costs)] > 0).any()]
    alone = {**changes, **{each: np.where(np.isinf(changes[each]), inf, 0.0) for each in shared}}
    nothing = np.zeros(len(have))
    own = [
        np.stack([sum((alone[each] for each in needs), start=nothing) for needs in reader.wanted], axis=1)
        for reader in read.readers
    ]
    return PricedRead(own, [_shared(read, each, changes[each], grid) for each in shared])


def _shared(read: LayoutRead, wanted: Placements, costs: Table, grid: AxisGrid) -> SharedChange:
    readers: list[tuple[int, NDArray[np.bool_]]] = []
    phases: dict[str, None] = {}
    for number, reader in enumerate(read.readers):
        needs = np.array([wanted in each for each in reader.wanted])
        if needs.any():
            readers.append((number, needs))
            phases[reader.phase] = None
    paid = np.where(np.isinf(costs), 0.0, costs)
    is_kept = "forward" in phases and "backward" in phases
    stays = np.where(paid > 0, read.spec.nbytes / grid.parts(wanted), 0.0) if is_kept else None
    return SharedChange(readers, paid, stays)
