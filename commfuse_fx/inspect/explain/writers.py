"""Who fills the memory that a collective sends: edges that data flow alone does not have."""

from __future__ import annotations

from torch import fx

from commfuse_fx.ir.core.dependence import Dependence, written_nodes
from commfuse_fx.ir.core.program import Program


def writers(program: Program) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """For each start of a collective the nodes before it that write into the memory it sends, in graph order."""
    roots = Dependence(program.graph, program.aliases()).roots
    starts = dict.fromkeys(program.collectives())
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    written: dict[fx.Node, dict[fx.Node, None]] = {}
    for node in program.graph.nodes:
        if node in starts:
            memory = dict.fromkeys(roots[value] for value in node.all_input_nodes)
            found[node] = tuple(dict.fromkeys(writer for root in memory for writer in written.get(root, ())))
        for value in written_nodes(node):
            written.setdefault(roots[value], {})[node] = None
    return found
