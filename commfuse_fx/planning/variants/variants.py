"""The ways to plan one step that are made and compared: those that passes offer, as many as the graph's size allows."""

from __future__ import annotations

from dataclasses import replace

from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import Situation, Variants
from commfuse_fx.planning.pipeline.pass_table import TABLE
from commfuse_fx.solvers.effort import EFFORT

LATER = 6
"""Plans that are made at most where strategies are searched, besides those of the first two rounds."""

WITH_LIMIT = 14
"""Plans that are made at most where strategies are searched, memory has a limit, and the graph is large: levels of the
parallel optimizer and strategies that save memory."""


def variants(situation: Situation, program: Program) -> Variants:
    """What to make and compare for a captured program. Of equally fast plans the first is taken."""
    found = offered(situation, program)
    return affordable(found, most_plans(situation, program, len(found.searched)))


def most_plans(situation: Situation, program: Program, first: int) -> int:
    """How many plans are made.

    first: those of the first round. Where strategies are searched, each of these but one is the beginning of another,
        also in a large graph.
    """
    plans = EFFORT.plans(len(program.graph.nodes))
    if not situation.searches:
        return plans
    if situation.config.memory_limit is not None:
        return max(plans, WITH_LIMIT)
    return min(max(plans, 2 * first - 1), 2 * first + LATER)


def offered(situation: Situation, program: Program) -> Variants:
    """All that passes offer, from the last one of the table to the first. One where nothing is planned by cost."""
    found = Variants()
    for each in reversed([each for passes in TABLE.values() for each in passes]):
        if situation.by_cost or each.always_offers:
            found = each.candidates(situation, program, found)
    return replace(found, fixed=tuple(each for each in found.fixed if each not in found.searched))


def affordable(found: Variants, plans: int) -> Variants:
    """Those of which so many plans can be made; further fixed ones are looked at, and left where they are known."""
    searched = found.searched[:plans]
    return Variants(searched, found.fixed if plans > len(searched) else ())
