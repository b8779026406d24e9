"""Which variables of a graph lie alike: those that nothing within some steps of them tells apart.

Blocks of a model that repeat lie alike, but for the first and the last ones.

Source: Weisfeiler and Leman, "The reduction of a graph to canonical form" (1968), as colour refinement.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from commfuse_fx.solvers.strategies.factor_graph import FactorGraph, Pair, Table

STEPS = 2
"""How far apart differences are seen. It decides how many of the first and last blocks count as different."""


@dataclass(frozen=True)
class Alike:
    """Classes and kinds are numbers.

    classes: the class of each variable. kinds: the kind of each pair of variables that has a cost together. Variables
    of one class have equally many pairs of each kind.
    """

    classes: Sequence[int]
    kinds: Mapping[Pair, int]


def apart(found: Alike) -> Alike:
    """Nothing is alike."""
    return Alike(range(len(found.classes)), {pair: number for number, pair in enumerate(found.kinds)})


def alike(graph: FactorGraph, steps: int = STEPS) -> Alike:
    """Which variables and pairs of a graph are alike. steps: from 1 on."""
    contents = _Numbers()
    tables: dict[int, int] = {}

    def content(table: Table) -> int:
        found = tables.get(id(table))
        if found is None:
            found = tables[id(table)] = contents[table.shape, table.tobytes()]
        return found

    joins: dict[Pair, list[Hashable]] = {pair: [content(table)] for pair, table in graph.pairs.items()}
    paid: list[list[int]] = [[] for _ in graph.unary]
    for key, costs in graph.once.items():
        number = len(paid[key.payer])
        paid[key.payer].append(content(costs))
        for reader, needed in key.needs:
            pair = (min(key.payer, reader), max(key.payer, reader))
            joins.setdefault(pair, []).append((key.payer < reader, number, contents[needed]))
    near: list[list[tuple[int, int]]] = [[] for _ in graph.unary]
    joined: dict[Pair, int] = {}
    for (one, other), costs_of_both in joins.items():
        number = joined[one, other] = contents[tuple(costs_of_both)]
        near[one].append((2 * number, other))
        near[other].append((2 * number + 1, one))
    first = _Numbers()
    found = [first[content(costs), tuple(own)] for costs, own in zip(graph.unary, paid, strict=True)]
    before = found
    for _ in range(steps):
        before, found = found, _finer(found, near)
    kinds = _Numbers()
    return Alike(found, {pair: kinds[number, before[pair[0]], before[pair[1]]] for pair, number in joined.items()})


def _finer(classes: Sequence[int], near: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
    numbers = _Numbers()
    return [
        numbers[own, tuple(sorted([(kind, classes[other]) for kind, other in around]))]
        for own, around in zip(classes, near, strict=True)
    ]


class _Numbers(dict[Hashable, int]):
    """Numbers keys in the order in which they are asked for."""

    def __missing__(self, key: Hashable) -> int:
        number = self[key] = len(self)
        return number
