"""The best plan for communication across steps, judged by the engine that simulations run on.

`cost.cyclic` makes the plans: orders by earliest need for several sizes of buckets and pieces. How fast they are
depends on what it leaves out, above all on a core that the backend's threads and the step share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from commfuse_fx.cost.cyclic import CyclicMember, CyclicPlan, PieceChoice
from commfuse_fx.cost.engine import Engine, Transfer
from commfuse_fx.cost.numbers import EQUAL, alike

MOST_ROUNDS = 8
"""Rounds after which a loop that does not settle is taken as it is."""

_SETTLED = 1e-3
"""Part of a burst that may be left more or less after a round than before it."""


@dataclass(frozen=True)
class Loop:
    """One step of a training loop as blocks of compute, in seconds.

    price: what a message of so many bytes takes. message: seconds of compute that handing one over takes. update:
    seconds of compute that each further member's update takes besides its elements.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    price: Callable[[int], Transfer]
    message: float = 0.0
    update: float = 0.0

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
                engine.run(self.update + members[member].update)
            engine.run(seconds)

    def best(self, choices: Iterable[tuple[PieceChoice, Sequence[CyclicMember]]]) -> tuple[PieceChoice, float]:
        """The fastest of these plans (with the members that each refers to), with the fewest messages among equals,
        and its period."""
        judged = [(self.period(members, choice.plan), choice) for choice, members in choices]
        limit = min(period for period, _ in judged) * (1 + EQUAL)
        period, choice = min(((p, c) for p, c in judged if p <= limit), key=lambda each: len(each[1].plan.order))
        return choice, period
