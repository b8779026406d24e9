"""Compute the last gradient earlier, and behind it what others have been waiting for.

When the last gradient to become ready is a large one (an embedding's, say), nothing is left to compute while it
is on the wire. Gradients of weights are needed by nobody but their own collectives: others can as well be
computed after it. Those that stand just before it hold least memory in the meantime; those of the last layers,
with which the backward begins, have the most time when it is the next step's forward that waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from commfuse_fx.cost.model import CostModel
from commfuse_fx.ir.core.collectives import is_start, role_of
from commfuse_fx.ir.core.dependence import Dependence, is_opaque
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.order import reorder
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.random_draws import draws_random_numbers
from commfuse_fx.passes.declaration import NO_PRICES, PassContext, PricedPass, Situation, Variants

AMPLE = 1.25
"""How much compute is put behind the last gradient across steps, in parts of what its all_reduce takes. A quarter more
than that: it may share the wire with another one, and a step may compute faster than usual."""

SCANT = (0.5, 0.25)
"""Halves of what it takes, where the wire is busy all the time: what is computed later would be sent too late."""


@dataclass(frozen=True)
class PostponeGradients(PricedPass):
    """Moves as much compute behind the last gradient as its own all_reduce takes. Bitwise neutral.

    `last_layers`: that of the gradients with which the backward begins, instead of those just before the last one.
    `part`: of what the all_reduce takes; less leaves room for updates, and more of the backward to send in.
    """

    name = "postpone_gradients"
    numerics = "bitwise"
    needs_sizes = True
    optional = True
    requires = ("reduced", "updated")

    last_layers: bool = False
    part: float = 1.0

    @classmethod
    def when(cls, situation: Situation) -> PostponeGradients | None:
        part = situation.variant.get("postponed", 0.0)
        if not situation.by_cost or not part:
            return None
        return cls(last_layers=situation.across_steps, part=part)

    @classmethod
    def candidates(cls, situation: Situation, program: Program, found: Variants) -> Variants:
        if not situation.config.comm_fusion.is_optimal or not situation.schedules:
            return found
        first, *others = found.searched
        if not situation.across_steps:
            return replace(found, searched=(first, first.but(postponed=1.0), *others))
        scant = (first.but(postponed=part) for part in SCANT)
        within = first.but(across_steps=False, postponed=1.0)
        return replace(found, searched=(first, first.but(postponed=AMPLE), *others, *scant, within))

    def __call__(self, program: Program, context: PassContext = NO_PRICES) -> bool:
        gradients = [start for start in program.collectives() if role_of(start) == "gradient"]
        if len(gradients) < 2:
            return False
        last = gradients[-1]
        before = Dependence(program.graph, program.aliases()).direct
        moved = self._movable(program, last, before, context.costs)
        if not moved:
            return False
        order: list[fx.Node] = []
        for node in program.graph.nodes:
            if node not in moved:
                order.append(node)
            if node is last:
                order.extend(moved)
        reorder(program.graph, order)
        return True

    def _movable(
        self, program: Program, last: fx.Node, before: dict[fx.Node, list[fx.Node]], costs: CostModel
    ) -> dict[fx.Node, None]:
        """Nodes that stand before the last gradient without being needed for it, in graph order."""
        needed = _ancestors(last, before)
        nodes = list(program.graph.nodes)
        candidates: list[fx.Node] = []
        left = self.part * costs.cost_of(last, mesh=program.mesh).seconds
        backward = _backward(nodes[: nodes.index(last)])
        for node in backward if self.last_layers else reversed(backward):
            if left <= 0:
                break
            if node not in needed and not is_start(node):
                candidates.append(node)
                left -= costs.compute_seconds(node)
        chosen = dict.fromkeys(candidates)
        moved: dict[fx.Node, None] = {}
        for node in nodes[: nodes.index(last)]:
            if node in chosen or any(other in moved for other in before[node]):
                if node in needed:
                    return {}
                moved[node] = None
        return moved


def _backward(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The end of these nodes, as far back as all are of the backward and known to have no effect on others."""
    for i in range(len(nodes) - 1, -1, -1):
        node = nodes[i]
        if info(node).phase != "backward" or is_opaque(node) or draws_random_numbers(node):
            return list(nodes[i + 1 :])
    return list(nodes)


def _ancestors(node: fx.Node, before: dict[fx.Node, list[fx.Node]]) -> dict[fx.Node, None]:
    found: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        for other in before[pending.pop()]:
            if other not in found:
                found[other] = None
                pending.append(other)
    return found
