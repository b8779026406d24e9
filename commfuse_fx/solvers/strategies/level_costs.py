"""Shift costs between the tables of a graph until the sum of their least entries, a bound, rises no more.

Walks over the variables, in their order and back, collect at each one what its pairs give away, and hand it on to the
pairs that follow. A cost that is paid once is divided so that each of those who need it pays no more than makes its own
choice dear. Variables that lie alike are first levelled out together, so that repeated blocks cost as one.

Source: Kolmogorov, "Convergent tree-reweighted message passing for energy minimization" (IEEE Transactions on Pattern
Analysis and Machine Intelligence 28, 2006); the shares of costs that are paid once are the dual ascent of Erlenkotter,
"A dual-based procedure for uncapacitated facility location" (Operations Research 26, 1978).

Why: docs/decisions.md, "What is too large for elimination gets a bound of its own, not an integer program".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from commfuse_fx.solvers.strategies.alike import Alike, alike, apart
from commfuse_fx.solvers.strategies.certificate import Certificate, Paid, paid_once
from commfuse_fx.solvers.strategies.factor_graph import FactorGraph, Pair, Table
from commfuse_fx.solvers.strategies.shifted_costs import PaidShares, Side


class Levelled:
    """The costs of a graph, while they are shifted: at first of variables that lie alike together.

    begin: how costs were shifted in a graph of the same variables; None: not at all.
    guesses: choices that were read off on the way, the last ones last.
    """

    def __init__(self, graph: FactorGraph, begin: Certificate | None = None) -> None:
        self._graph = graph
        self._paid = paid_once(graph)
        self._alike = alike(graph)
        self._walks = Walks(graph, self._paid, self._alike, begin)
        self.guesses: list[Sequence[int]] = []

    def walk(self, times: int) -> None:
        """So many walks there and back."""
        for _ in range(times):
            self.guesses += self._walks.there_and_back()

    def take_apart(self) -> None:
        """From now on, each variable by itself."""
        self._walks = Walks(self._graph, self._paid, apart(self._alike), self.certificate())

    def bound(self) -> float:
        """No choice costs less, but for rounding."""
        return self._walks.bound()

    def above(self) -> list[Table]:
        """What a choice with each state of each variable costs more than the bound at the least."""
        return self._walks.above()

    def certificate(self) -> Certificate:
        return self._walks.certificate()


class Walks:
    """Walks over the classes of variables that are alike, each of which one of its variables stands for."""

    def __init__(
        self, graph: FactorGraph, paid: Mapping[int, Paid], found: Alike, begin: Certificate | None = None
    ) -> None:
        self._paid = paid
        self._found = found
        self._states = dict.fromkeys(found.classes, 0)  # by class
        most = graph.most()
        members: dict[int, list[int]] = {}
        for number, own in enumerate(found.classes):
            members.setdefault(own, []).append(number)
        self._order = sorted(each[len(each) // 2] for each in members.values())
        self._sizes = {own: len(each) for own, each in members.items()}
        stand_ins = dict.fromkeys(self._order)
        self._sides: dict[tuple[int, int, int], Side] = {}
        self._left: dict[tuple[int, int, int], Table] = {}
        self._pairs: dict[tuple[int, int, int], int] = {}  # that have what is left in common
        for pair, kind in found.kinds.items():
            one, other = (found.classes[number] for number in pair)
            left = self._left.get((kind, one, other))
            self._pairs[kind, one, other] = self._pairs.get((kind, one, other), 0) + 1
            if left is None:
                costs = graph.pairs.get(pair)
                sizes = len(graph.unary[pair[0]]), len(graph.unary[pair[1]])
                left = np.zeros(sizes) if costs is None else np.minimum(costs, most)
                self._left[kind, one, other] = left
                for side, own in enumerate((one, other)):
                    found_side = self._sides.get((own, kind, side))
                    if found_side is None:
                        found_side = self._sides[own, kind, side] = self._side(pair, side, left.shape[side], begin)
                    found_side.add(left if side == 0 else left.T)
            for side, number in enumerate(pair):
                if number in stand_ins:
                    self._sides[found.classes[number], kind, side].meet(
                        left if side == 0 else left.T, found.classes[pair[1 - side]]
                    )
        self._around: dict[int, list[Side]] = {own: [] for own in members}
        for (own, _, _), each in self._sides.items():
            self._around[own].append(each)
        self._own: dict[int, Table] = {}
        for number in self._order:
            costs = np.minimum(graph.unary[number], most)
            for each in self._around[found.classes[number]]:
                costs = costs + each.count * each.given
            self._own[number] = costs

    def _side(self, pair: Pair, side: int, states: int, begin: Certificate | None) -> Side:
        payer, reader = pair if side == 0 else pair[::-1]
        known = begin.shifts.get(pair) if begin is not None else None
        given = np.zeros(states) if known is None else known[side].copy()
        needs = self._paid[payer].needs.get(reader) if payer in self._paid else None
        if needs is None:
            return Side(side == 0, given, None)
        taken = begin.shares.get((payer, reader)) if begin is not None else None
        if taken is None or taken.shape != (states, len(needs)):  # it pays for other things now
            taken = np.zeros((states, len(needs)))
        return Side(side == 0, given, PaidShares(needs, taken))

    def there_and_back(self) -> tuple[Sequence[int], Sequence[int]]:
        """A walk over all variables and one back. Returns the choices that are read off on each."""
        for number in self._order:
            self._visit(number, True)
        there = self._choice()
        for number in reversed(self._order):
            self._visit(number, False)
        return there, self._choice()

    def _choice(self) -> Sequence[int]:
        return tuple(self._states[own] for own in self._found.classes)

    def _visit(self, number: int, forward: bool) -> None:
        own, around = self._own[number], self._around[self._found.classes[number]]
        if number in self._paid and not forward:
            self._divide(self._paid[number].costs, around)
        best = own.copy()
        least = [np.minimum.reduce(each.left, axis=1) for each in around]
        follow = behind = 0
        for each, costs in zip(around, least, strict=True):
            own += costs if each.count == 1 else each.count * costs
            if each.follows == forward:
                follow += each.count
                best += costs
            else:
                behind += each.count
                best += each.left[:, self._states[each.other]]
        self._states[self._found.classes[number]] = int(best.argmin())
        part = own / max(follow, behind, 1)
        for each, costs in zip(around, least, strict=True):
            each.give(costs - part if each.follows == forward else costs)
        own -= follow * part

    @staticmethod
    def _divide(costs: Table, around: Sequence[Side]) -> None:
        """Divide what a variable pays once among those who need it."""
        takers = [(each, each.shares) for each in around if each.shares is not None]
        free = costs.copy()
        for each, shares in takers:
            free[:, shares.which] -= each.count * shares.taken
        for each, shares in takers:
            most = np.maximum(free[:, shares.which] / each.count + shares.taken, 0.0)
            free[:, shares.which] -= each.count * each.take(shares, most)

    def certificate(self) -> Certificate:
        """How costs are shifted by now."""
        shifts: dict[Pair, tuple[Table, Table]] = {}
        shares: dict[tuple[int, int], Table] = {}
        for pair, kind in self._found.kinds.items():
            one, other = (self._sides[self._found.classes[number], kind, side] for side, number in enumerate(pair))
            shifts[pair] = one.given, other.given
            for each, way in ((one, pair), (other, pair[::-1])):
                if each.shares is not None:
                    shares[way] = each.shares.spread(self._paid[way[0]].costs.shape[1])
        return Certificate(shifts, shares)

    def bound(self) -> float:
        """The sum of all least entries."""
        sizes, classes = self._sizes, self._found.classes
        found = sum(sizes[classes[number]] * float(costs.min()) for number, costs in self._own.items())
        return found + sum(self._pairs[key] * float(left.min()) for key, left in self._left.items())

    def above(self) -> list[Table]:
        """What a choice with each state of each variable costs more than the bound at the least."""
        found: dict[int, Table] = {}
        for number, costs in self._own.items():
            own = self._found.classes[number]
            costs = costs.copy()
            for each in self._around[own]:
                costs += each.count * each.left.min(axis=1)
            found[own] = costs - costs.min()
        return [found[own] for own in self._found.classes]
