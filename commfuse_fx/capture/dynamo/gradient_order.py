"""In which order the gradients of a graph of Dynamo become ready when autograd computes them.

Why: docs/decisions.md, "Autograd runs a graph for any size, and a compiled backward sends its gradients".
"""

from __future__ import annotations

from torch import fx

from commfuse_fx.capture.dynamo.graph_of_dynamo import Names


def gradient_order(graph: fx.GraphModule, names: Names) -> list[str]:
    """The parameters and buffers among the arguments, by name, the last one first.

    Autograd goes back from the last op to the first. A gradient is complete behind the first op that reads the
    parameter.
    """
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    named = dict(zip(inputs, names, strict=True))
    read = (named.get(value) for node in graph.graph.nodes for value in node.all_input_nodes)
    return list(dict.fromkeys(name for name in read if name is not None))[::-1]
