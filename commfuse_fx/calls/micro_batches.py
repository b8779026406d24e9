"""Which calls of a step are micro-batches that another one follows, and what they leave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from commfuse_fx.errors import CaptureError
from commfuse_fx.ir.core.program import Program
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.planning.planner import Planner
from commfuse_fx.runtime.memory.held_gradients import HeldGradients
from commfuse_fx.support.long_lists import shortened


class MicroBatches:
    """Counts the micro-batches of an update. The last one reduces the sum of their gradients, and updates.

    count: how many there have been since the last update. An evaluation is none, nor is a call that has failed.
    """

    def __init__(self, planner: Planner) -> None:
        self.count = 0
        self._planner = planner
        self._reached: dict[str, None] = {}  # parameters that have gradients of these
        self._is_paused = False

    @property
    def is_early(self) -> bool:
        """Whether a call made now only adds to the gradients, as others follow."""
        most = self._planner.config.accumulate_steps
        return self.count + 1 < most and not self._is_paused and self._planner.watch.trains

    def plan(self, plan: Plan) -> Plan:
        """What a call runs now that is early: the plan of the micro-batches ahead of the one that this plan is for."""
        return self._planner.early(plan)

    def begin(self, held: Iterable[HeldGradients]) -> None:
        """Before a call. held: the gradients of each rank."""
        if self.count == 0 and self.is_early:
            for each in held:
                each.clear()

    def check(self, program: Program) -> None:
        """Raises CaptureError if the program updates, but leaves out what earlier micro-batches have reached."""
        if not self._reached or self._is_paused or self.is_early or not program.training:
            return
        held = dict.fromkeys(_held(program))
        if missing := [name for name in self._reached if name not in held]:
            names = ", ".join(shortened(missing, 8, "{} others"))
            raise CaptureError(
                f"the last of {self._planner.config.accumulate_steps} micro-batches has no gradient of {names}, which "
                "earlier ones have: call the step with a batch that reaches all of them, or "
                "step.drop_micro_batches() to forget the gradients since the last update"
            )

    def done(self, program: Program) -> bool:
        """After a call that has run this program. Returns whether it was a whole training step."""
        if self._is_paused or not program.training:
            return program.training
        if not self.is_early:
            self.drop()
            return True
        self.count += 1
        self._reached.update(dict.fromkeys(_held(program)))
        return False

    def drop(self) -> None:
        """Forget the micro-batches since the last update."""
        self.count = 0
        self._reached.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Each call inside the block is the last micro-batch, and none of them counts."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False


def _held(program: Program) -> list[str]:
    """The parameters whose gradients a program adds to."""
    return [source.name.removesuffix(".grad") for source in program.sources.values() if source.kind == "gradient"]
