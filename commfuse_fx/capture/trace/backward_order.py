"""The order in which autograd's engine would run the backward of a forward that was put in another order.

Why: docs/decisions.md, "The order of a set decides nothing".
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from torch import fx

from commfuse_fx.capture.trace.call_paths import CallPaths


class BackwardOrder:
    """Orders the events of a backward pass as autograd's engine does.

    Of the nodes that are ready, the engine runs the one whose forward op came last. Ops of autograd itself, such as
    sums of gradients, run as soon as they are ready.

    needs: for each event the earlier events that it needs. forward: the forward events in their new order.
    added: the events that add up gradients.
    """

    def __init__(
        self, calls: CallPaths, needs: Mapping[int, Sequence[int]], forward: Sequence[int], added: Mapping[int, fx.Node]
    ) -> None:
        self.calls = calls
        self.added = added
        self.needs = needs
        rank = {number: i for i, number in enumerate(forward)}
        made = {sequence: [n for n in numbers if n in rank] for sequence, numbers in calls.by_sequence.items()}
        known = sorted((sequence, rank[numbers[0]]) for sequence, numbers in made.items() if numbers)
        self.sequences = [sequence for sequence, _ in known]
        self.ranks = [found for _, found in known]

    def arranged(self, runs: Sequence[Sequence[int]]) -> list[int]:
        """The events of these runs, in the engine's order."""
        owner = {number: i for i, part in enumerate(runs) for number in part}
        users: dict[int, list[int]] = {}
        missing = [0] * len(runs)
        for i, part in enumerate(runs):
            needed = dict.fromkeys(owner[other] for number in part for other in self.needs[number] if other in owner)
            needed.pop(i, None)
            missing[i] = len(needed)
            for other in needed:
                users.setdefault(other, []).append(i)
        ready = [(self._urgency(part), i) for i, part in enumerate(runs) if not missing[i]]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            _, i = heapq.heappop(ready)
            order += runs[i]
            for user in users.get(i, ()):
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, (self._urgency(runs[user]), user))
        if len(order) < sum(map(len, runs)):  # a backward within a backward, whose runs need each other
            return [number for part in runs for number in part]
        return order

    def _urgency(self, run: Sequence[int]) -> tuple[int, int]:
        """The sort key of a run; the lowest runs first."""
        sequence = self.calls.events[run[0]].sequence
        if sequence is None or run[0] in self.added:
            return (0, 0)
        # A node without a known forward op belongs to the op before it.
        place = bisect_right(self.sequences, sequence) - 1
        return (1, -self.ranks[place] if place >= 0 else 1)
