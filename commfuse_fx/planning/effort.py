"""How much work a compile may spend on choosing among plans: one number bounds it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """An effort is a budget for the plans of one graph.

    node_plays: captured nodes that may be planned and played, each once for every plan.
    """

    node_plays: int

    def plans(self, nodes: int) -> int:
        """How many plans of a graph of so many captured nodes are made and compared: one at least."""
        return max(1, self.node_plays // max(nodes, 1))


EFFORT = Effort(14_000)
"""About a second of a core: a plan takes 50 to 80 us for each node of the captured graph (docs/benchmarks.md, compile
cost). A graph of more nodes gets one plan, and planning takes as long as the graph is large."""
