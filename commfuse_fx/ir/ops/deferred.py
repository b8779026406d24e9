"""Nodes that run in the following step, and the order in which a round of steps runs all nodes."""

from __future__ import annotations

from torch import fx

from commfuse_fx.errors import VerificationError
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program


def is_deferred(node: fx.Node) -> bool:
    """True for a node that runs in the step after its own."""
    return info(node).next_step is not None


def execution_order(program: Program) -> list[fx.Node]:
    """The nodes in the order of one round: those left over from the step before stand just before their anchors.

    Raises VerificationError for an anchor that is not in the graph or does itself run in the following step.
    """
    nodes = list(program.graph.nodes)
    before: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        anchor = info(node).next_step
        if anchor is not None:
            before.setdefault(anchor, []).append(node)
    if not before:
        return nodes
    order: list[fx.Node] = []
    for node in nodes:
        if not is_deferred(node):
            order.extend(before.pop(node, ()))
            order.append(node)
    for anchor, left in before.items():
        raise VerificationError(
            f"node {info(left[0]).name} is to run in the next step before {anchor.name}, which "
            "is not a node of this step that runs in its own step"
        )
    return order
