"""The best plan for communication across steps, judged by the engine that simulations run on.

`solvers.cyclic` makes the plans: orders by earliest need for several sizes of buckets and pieces. How fast they are
depends on what it leaves out, above all on a core that the backend's threads and the step share.

Why: docs/decisions.md, "Plans are compared to the end, and the fastest by simulation is taken".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from commfuse_fx.cost.numbers import EQUAL, alike
from commfuse_fx.cost.transfer import Transfer
from commfuse_fx.simulate.engine import Engine
from commfuse_fx.solvers.buckets.cyclic import CyclicMember, CyclicPlan
from commfuse_fx.solvers.buckets.piece_choices import PieceChoice

MOST_ROUNDS = 8
"""Rounds after which a loop that does not settle is taken as it is."""

NEAR = 3e-3
"""Plans whose periods differ by no more than this part of them are chosen between by how they bear late results."""

LATE = 0.05
"""How late the results are then, in parts of the step's compute: as far as ranks get ahead of each other."""

_SETTLED = 1e-3
"""Part of a burst that may be left more or less after a round than before it."""


@dataclass(frozen=True)
class Loop:
    """One step of a training loop as blocks of compute, in seconds.

    price: what a message of so many bytes takes. message: seconds of compute that handing one over takes. update:
    seconds of compute that each further member's update takes besides its elements. late: seconds by which every
    result comes later than the wire alone would have it, because another rank is behind.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    price: Callable[[int], Transfer]
    message: float = 0.0
    update: float = 0.0
    late: float = 0.0

    def period(self, members: Sequence[CyclicMember], plan: CyclicPlan) -> float:
        """Seconds from one step to the next.

        Every member is waited for in the forward, so that nothing is on the wire when a backward begins: one round
        from there tells all, but for what links may still carry in a burst. Where there are such, rounds are played
        until one leaves of that what the one before it left.
        """
        engine = Engine()
        sends: dict[int, list[tuple[int, int]]] = {}
        for (member, begin, end), block in zip(plan.order, plan.issue_after, strict=True):
            sends.setdefault(block, []).append((member, end - begin))
        updates: dict[int, list[int]] = {}
        for member, block in plan.update_order:
            updates.setdefault(block, []).append(member)
        began = 0.0
        for _ in range(MOST_ROUNDS):
            before, began = engine.allowances(), engine.now
            self._play(engine, members, sends, updates)
            if alike(before, engine.allowances(), _SETTLED):
                break
        return engine.now - began

    def _play(
        self,
        engine: Engine,
        members: Sequence[CyclicMember],
        sends: Mapping[int, Sequence[tuple[int, int]]],
        updates: Mapping[int, Sequence[int]],
    ) -> None:
        """One round. By block: (member, bytes) that are sent after it, and members that are updated before it."""
        on_wire: dict[int, list[int]] = {}
        for block, seconds in enumerate(self.backward):
            engine.run(seconds)
            for member, nbytes in sends.get(block, ()):
                engine.run(self.message)
                on_wire.setdefault(member, []).append(engine.issue(self.price(nbytes)))
        for block, seconds in enumerate(self.forward):
            for member in updates.get(block, ()):
                for handle in on_wire.pop(member, ()):
                    engine.wait(handle)
                    if self.late:
                        engine.rest(engine.times(handle)[2] + self.late)
                engine.run(self.update + members[member].update)
            engine.run(seconds)

    def best(self, choices: Iterable[tuple[PieceChoice, Sequence[CyclicMember]]]) -> tuple[PieceChoice, float]:
        """One of these plans (with the members that each refers to), and its period.

        The fastest ones differ by less than compute varies from step to step and from rank to rank. Of those `NEAR` the
        fastest the one is taken that is fastest where results come late, with the fewest messages among equals.
        """
        judged = [(self.period(members, choice.plan), choice, members) for choice, members in choices]
        limit = min(period for period, *_ in judged) * (1 + NEAR)
        near = [each for each in judged if each[0] <= limit]
        if len(near) == 1:
            return near[0][1], near[0][0]
        behind = replace(self, late=LATE * (sum(self.forward) + sum(self.backward)))
        delayed = [behind.period(members, choice.plan) for _, choice, members in near]
        limit = min(delayed) * (1 + EQUAL)
        equals = [(period, choice) for (period, choice, _), late in zip(near, delayed, strict=True) if late <= limit]
        period, choice = min(equals, key=lambda each: len(each[1].plan.order))
        return choice, period
