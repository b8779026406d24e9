"""Compute the gradient of a weight before that of what the layer was given.

The backward of a layer makes both from the same values, and autograd leaves their order to chance. The weight's
gradient has to cross the network, the other one has not: computed first, it leaves earlier by the time that the other
takes. At the head of a language model that is as long as several layers take, with a wire that has nothing to carry.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from commfuse_fx.ir.core.collectives import is_start, role_of
from commfuse_fx.ir.core.dependence import Dependence, is_opaque
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.order import reorder
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.random_draws import draws_random_numbers
from commfuse_fx.passes.declaration import Pass, Situation


@dataclass(frozen=True)
class GradientsFirst(Pass):
    """What only gradients' collectives need moves up to behind the last thing that it needs itself. Bitwise neutral."""

    name = "gradients_first"
    numerics = "bitwise"
    needs_sizes = True
    requires = ("reduced",)

    @classmethod
    def when(cls, situation: Situation) -> GradientsFirst | None:
        return cls() if situation.schedules and situation.same_batches else None

    def __call__(self, program: Program) -> bool:
        nodes = list(program.graph.nodes)
        moved = _for_one_gradient(nodes)
        if not moved:
            return False
        before = Dependence(program.graph, program.aliases()).direct
        floor = max((i for i, node in enumerate(nodes) if is_start(node) and role_of(node) == "buffer"), default=-1)
        behind: dict[fx.Node, list[fx.Node]] = {}
        place: dict[fx.Node, int] = {}  # of the last node that stays where it is, and must come before
        for i, node in enumerate(nodes):
            if node not in moved:
                place[node] = i
                continue
            place[node] = max((place[other] for other in before[node]), default=i)
            if place[node] < floor < i:  # buffers are sent ahead of gradients
                place[node] = floor
            behind.setdefault(nodes[place[node]], []).append(node)
        order: list[fx.Node] = []
        for node in nodes:
            if node not in moved:
                order.append(node)
            order.extend(behind.get(node, ()))
        if order == nodes:
            return False
        reorder(program.graph, order)
        return True


def _for_one_gradient(nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Nodes of the backward that one gradient's collective needs and nothing else, with its start. It is among them."""
    found: dict[fx.Node, fx.Node] = {}
    for node in reversed(nodes):
        if node.op != "call_function" or info(node).phase != "backward":
            continue
        if is_start(node):
            if role_of(node) == "gradient":
                found[node] = node
        elif not is_opaque(node) and not draws_random_numbers(node):
            served = {found.get(user) for user in node.users}
            if len(served) == 1 and (start := served.pop()) is not None:
                found[node] = start
    return found
