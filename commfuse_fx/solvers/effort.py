"""How much work a compile may spend on choosing among plans: one number bounds it.

Why: docs/decisions.md, "Plans are compared to the end, and the fastest by simulation is taken".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """An effort is a budget for trying plans of one size.

    node_plays: nodes that may be planned and played, each once for every plan: captured nodes of a graph, members of
        the loop in which buckets across steps are searched for, or collectives whose cuts into buckets are played.
    """

    node_plays: int

    def plans(self, nodes: int) -> int:
        """How many plans of so many nodes are made and compared: one at least."""
        return max(1, self.node_plays // max(nodes, 1))


EFFORT = Effort(14_000)
"""About a second of a core: a plan takes 50 to 80 us for each node of the captured graph (docs/benchmarks.md, compile
cost). A graph of more nodes gets one plan, and planning takes as long as the graph is large."""
