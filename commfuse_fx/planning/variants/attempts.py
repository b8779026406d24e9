"""The plans of a step that are made and compared, for those who look on while they are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from commfuse_fx.cost.numbers import in_ms
from commfuse_fx.ir.core.program import Program
from commfuse_fx.planning.pipeline.pipeline import PassPipeline


@dataclass(frozen=True)
class Attempt:
    """An attempt at a plan.

    number, most: its number from 1, and how many there may be in all; mostly there are fewer.
    pipeline: the passes of the plan.
    program: the final one; None where no arrangement fits into memory.
    seconds: predicted for a step; None where nothing is compared, or nothing fits.
    needed: bytes that the plan takes at least, where that is too much; else 0.
    is_known: whether it has come to the graph of an earlier attempt, so that nothing new was made.
    """

    number: int
    most: int
    pipeline: PassPipeline
    program: Program | None
    seconds: float | None = None
    needed: int = 0
    is_known: bool = False


OnPlan = Callable[[Attempt], None]


def shown_plans(what: str, show: Callable[[str], None], others: OnPlan | None = None) -> OnPlan:
    """Shows, after each plan, which one comes next and what the fastest one so far takes.

    what: is being done. others: told of each plan as well.
    """
    best: list[float] = []

    def on_plan(made: Attempt) -> None:
        if made.seconds is not None:
            best[:] = [min([made.seconds, *best])]
        if made.number < made.most:
            so_far = f", best so far {in_ms(best[0])}" if best else ""
            show(f"{what}: plan {made.number + 1} of at most {made.most}{so_far}")
        if others is not None:
            others(made)

    return on_plan
