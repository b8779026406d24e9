"""Copies of gradients that are there or not by who holds a reference to the gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from commfuse_fx.capture.trace.provenance import origin_of
from commfuse_fx.ir.core.meta import spec_of

_aten = torch.ops.aten


def drop_copies_of_gradients(graph: fx.Graph, first: int) -> None:
    """Let `.grad` be the gradient that the backward has computed, in place of a copy that lies as the gradient does.

    Autograd takes a gradient over where nobody else holds it, and copies it otherwise. Another thread that looks at
    frames, such as a sampling profiler, holds what it sees, and a trace would have other copies in every run. A copy
    stays where its gradient is that of another leaf already, or is no result of the backward.

    first: the place of the leaves' gradients among the results.
    """
    results: Any = graph.output_node().args[0]
    taken = dict.fromkeys(results[first:])
    for node in reversed(list(graph.nodes)):
        if not _copies_a_gradient(node):
            continue
        memory, gradient = node.args
        if gradient not in taken:
            taken[gradient] = None
            node.replace_all_uses_with(gradient)
            graph.erase_node(node)
            graph.erase_node(memory)


def _copies_a_gradient(node: fx.Node) -> bool:
    """Whether autograd has copied what an op of the backward has made, to memory of the same order."""
    if node.target is not _aten.copy.default or origin_of(node).known or origin_of(node).phase != "backward":
        return False
    memory, gradient = node.args[:2]
    if not isinstance(memory, fx.Node) or not isinstance(gradient, fx.Node) or len(memory.users) > 1:
        return False
    made_for_it = memory.target is _aten.new_empty_strided.default and memory.args[0] is gradient
    is_of_backward = gradient.op == "call_function" and origin_of(gradient).phase == "backward"
    return made_for_it and is_of_backward and spec_of(node.meta["val"]) == spec_of(gradient.meta["val"])
