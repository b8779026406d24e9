"""The graph for people who like to ask networkx: longest paths, ancestors, cuts."""

from __future__ import annotations

from typing import Any

import networkx as nx

from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.naming import op_name
from commfuse_fx.ir.core.program import Program


def to_networkx(program: Program) -> nx.DiGraph:
    """Nodes are canonical names; data flows along the edges. Order by mutation is not in it."""
    graph = nx.DiGraph()
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        details = info(node)
        op = op_name(node.target) if node.op == "call_function" else "input"
        attributes: dict[str, Any] = {"phase": details.phase, "module": details.module, "op": op}
        if details.collective is not None:
            attributes["collective"] = details.collective
        graph.add_node(details.name, **attributes)
        graph.add_edges_from((info(value).name, details.name) for value in node.all_input_nodes)
    return graph
