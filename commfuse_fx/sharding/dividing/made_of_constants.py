"""What a step computes of constants and random seeds alone: masks of dropout, ranges, zeros."""

from __future__ import annotations

from torch import fx

from commfuse_fx.ir.core.dependence import Roots, written_nodes
from commfuse_fx.ir.core.meta import TensorSpec, info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.random_draws import draws_random_numbers


class MadeOfConstants:
    """Knows the nodes to which nothing leads that a rank could have a part of. Nodes are asked about in graph order.

    What draws random numbers without a counter is none of them, as all ranks draw all numbers in the order of the
    graph; nor is what an op writes to later.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._roots = Roots(program.graph, program.aliases())
        written = (self._roots[value] for node in program.graph.nodes for value in written_nodes(node))
        self._written = dict.fromkeys(written)
        self._known: dict[fx.Node, None] = {}

    def has(self, node: fx.Node) -> bool:
        """Whether a node that is a call is one of them."""
        if not isinstance(info(node).spec, TensorSpec) or draws_random_numbers(node):
            return False
        if self._roots[node] in self._written or not all(map(self._is_constant, node.all_input_nodes)):
            return False
        self.add(node)
        return True

    def add(self, node: fx.Node) -> None:
        """The division makes a constant of this node."""
        self._known[node] = None

    def _is_constant(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return self._program.sources[node].kind == "seed"
        return node.op == "get_attr" or node in self._known
