"""A graph of variables with costs, with some of its states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from commfuse_fx.solvers.strategies.factor_graph import FactorGraph, Once, Table


def in_whole(left: Sequence[NDArray[np.intp]], states: Sequence[int]) -> tuple[int, ...]:
    """States of the graph that `with_states` makes, as they are numbered in the whole graph."""
    return tuple(int(each[own]) for each, own in zip(left, states, strict=True))


def with_states(graph: FactorGraph, left: Sequence[NDArray[np.intp]]) -> FactorGraph:
    """The graph in which each variable has these states left. Equal tables stay one object."""
    keys = [each.tobytes() for each in left]
    known: dict[tuple[object, ...], Table] = {}
    known_needs: dict[tuple[bytes, bytes], bytes] = {}
    is_paid: dict[int, bool] = {}

    def take(table: Table, *numbers: int) -> Table:
        key = (id(table), *(keys[number] for number in numbers))
        if key not in known:
            known[key] = table[np.ix_(*(left[number] for number in numbers))]
        return known[key]

    def rest_of(number: int, needed: bytes) -> bytes:
        key = needed, keys[number]
        if key not in known_needs:
            known_needs[key] = bytes(needed[state] for state in left[number])
        return known_needs[key]

    def counts(table: Table) -> bool:
        if id(table) not in is_paid:
            is_paid[id(table)] = bool(table.any())
        return is_paid[id(table)]

    found = FactorGraph()
    found.unary = [take(table, number) for number, table in enumerate(graph.unary)]
    found.pairs = {pair: take(table, *pair) for pair, table in graph.pairs.items()}
    for key, costs in graph.once.items():
        costs = take(costs, key.payer)
        if not counts(costs):
            continue
        needs = tuple((number, rest) for number, needed in key.needs if any(rest := rest_of(number, needed)))
        if needs:
            one = Once(key.payer, needs)
            found.once[one] = found.once[one] + costs if one in found.once else costs
    return found
