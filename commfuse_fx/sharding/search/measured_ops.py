"""What a profile knows of the ops of a step whose strategies are searched."""

from __future__ import annotations

from typing import Any

from torch import fx

from commfuse_fx.cost.model import CostModel
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program


def times_roofline(program: Program, costs: CostModel) -> dict[fx.Node, float]:
    """How many times as long as the roofline says a node took, for those that were measured. Of nodes that are alike
    all count together, so that layers stay alike and are searched as one."""
    alike: dict[Any, list[tuple[fx.Node, float, float]]] = {}
    for node in program.graph.nodes:
        known = costs.measured(node)
        if known is not None:
            specs = (info(node).spec, *(info(each).spec for each in node.all_input_nodes))
            alike.setdefault((node.target, specs), []).append((node, *known))
    found: dict[fx.Node, float] = {}
    for each in alike.values():
        times = sum(seconds for _, seconds, _ in each) / sum(modelled for *_, modelled in each)
        found.update((node, times) for node, *_ in each)
    return found
