"""The ways to plan one step that are made and compared: those that passes offer, as many as the graph's size allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from commfuse_fx.ir.program import Program
from commfuse_fx.passes.declaration import Situation, Variants
from commfuse_fx.planning.pass_table import TABLE

SEARCHES = ((2_100, 8), (3_500, 5), (5_000, 3), (7_000, 2))
"""How many variants are searched for buckets, for graphs of up to so many nodes; a single one above."""


PLANS = ((1_000, 27), (1_500, 13), (2_100, 9))
"""How many plans are made to the end and compared, for graphs of up to so many nodes; above as many as are searched."""


def variants(situation: Situation, program: Program) -> Variants:
    """What to make and compare for a captured program. Of equally fast plans the first is taken."""
    return affordable(offered(situation, program), len(program.graph.nodes))


def offered(situation: Situation, program: Program) -> Variants:
    """All that passes offer, from the last one of the table to the first. One where nothing is planned by cost."""
    found = Variants()
    if situation.by_cost:
        for each in reversed([each for passes in TABLE.values() for each in passes]):
            found = each.candidates(situation, program, found)
        return replace(found, fixed=tuple(each for each in found.fixed if each not in found.searched))
    return found


def affordable(found: Variants, nodes: int) -> Variants:
    """Those of them that a graph of so many nodes leaves time for."""
    searched = found.searched[: _up_to(SEARCHES, nodes, 1)]
    return Variants(searched, found.fixed if most_plans(nodes) > len(searched) else ())


def most_plans(nodes: int) -> int:
    """How many plans are made at most for a graph of so many nodes."""
    return _up_to(PLANS, nodes, _up_to(SEARCHES, nodes, 1))


def _up_to(limits: Sequence[tuple[int, int]], nodes: int, above: int) -> int:
    return next((count for most, count in limits if nodes <= most), above)
