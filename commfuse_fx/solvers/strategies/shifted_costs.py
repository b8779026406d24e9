"""The costs that variables of a graph have together, while they are shifted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from commfuse_fx.solvers.strategies.factor_graph import Table


class PaidShares:
    """What a variable takes of the costs that another one pays once.

    which: the numbers of those costs of the payer that it ever needs. taken: [states of the payer, these].
    """

    def __init__(self, needs: NDArray[np.bool_], taken: Table) -> None:
        self.which = np.flatnonzero(needs.any(axis=1))
        own = needs[self.which]
        self.needs = own.astype(np.float64)
        self.taken = taken[:, self.which]
        rows, self._columns = np.nonzero(own)
        self._starts = np.searchsorted(rows, np.arange(len(own)))

    def raise_least(self, left: Table, most: Table) -> Table:
        """Take so much, and no more, that the least of what is left becomes as high as it can. Returns what is more.

        left: [states of the payer, own states]. most: what may be taken, as `taken`.
        """
        without = left - self.taken @ self.needs
        least = (without + most @ self.needs).min(axis=1)
        dear = np.minimum.reduceat(without[:, self._columns], self._starts, axis=1)
        taken = np.minimum(np.maximum(least[:, None] - dear, 0.0), most)
        more: Table = taken - self.taken
        self.taken = taken
        return more

    def spread(self, count: int) -> Table:
        """What is taken of all that the payer pays, which are so many costs."""
        found = np.zeros((len(self.taken), count))
        found[:, self.which] = self.taken
        return found


class Side:
    """What a variable has together with others that are alike for it, and what others like it have as well.

    follows: whether these others have higher numbers. given: what has been given to each of its states. shares: what
    the others take of that which it pays once. left: what is left, [its states, those of the other one]. other: the
    class of one of them. count: how many they are.
    """

    left: Table

    def __init__(self, follows: bool, given: Table, shares: PaidShares | None) -> None:
        self.follows = follows
        self.given = given
        self.shares = shares
        self.other = self.count = 0
        self._tables: list[Table] = []

    def add(self, left: Table) -> None:
        """Add costs of a variable with one of these others, of which something has been taken and given already."""
        left -= self.given[:, None]
        if self.shares is not None:
            left += self.shares.taken @ self.shares.needs
        self._tables.append(left)

    def meet(self, left: Table, other: int) -> None:
        """One of the others is met: of the variable that stands for all that are like it."""
        self.count += 1
        self.left, self.other = left, other

    def give(self, costs: Table) -> None:
        """Give costs to the states of the variable."""
        self.given += costs
        column = costs[:, None]
        for each in self._tables:
            each -= column

    def take(self, shares: PaidShares, most: Table) -> Table:
        """Take as much as helps of what the variable pays once, and at most this. Returns what is taken more."""
        more = shares.raise_least(self.left, most)
        costs = more @ shares.needs
        for each in self._tables:
            each += costs
        return more
