"""Compiles the graphs of one call of a model with Dynamo in front, to be read: none of them is run.

Why: docs/decisions.md, "`lower()` with Dynamo in front runs the model's code".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from commfuse_fx.calls.graph_session import GraphCalls
from commfuse_fx.inspect.explain_graphs import AsItIs
from commfuse_fx.inspect.lowered import Lowered
from commfuse_fx.ops import refuse_to_send

_SENDING = (".commfuse", "c10d_functional", ".c10d")


class Lowering:
    """Takes note of the graphs that a call comes to.

    compiled: the graphs, in the order in which they were first run. as_they_are: those that are not compiled.
    sent: names of the buffers that their backwards send.
    """

    def __init__(self) -> None:
        self.compiled: list[Lowered] = []
        self.as_they_are: dict[AsItIs, None] = {}
        self.sent: dict[str, None] = {}
        self._seen: dict[tuple[int, str], None] = {}

    def add(self, calls: GraphCalls, args: Sequence[Any]) -> None:
        """The call runs this graph with these arguments."""
        lowered = calls.read(args)
        if (calls.number, lowered.fingerprint) not in self._seen:
            self._seen[calls.number, lowered.fingerprint] = None
            self.compiled.append(lowered)
            self.sent.update(dict.fromkeys(calls.buffers))


def refuse_collectives(graph: fx.GraphModule) -> None:
    """Raises NotAvailableError for a graph that would send something when it is run op by op."""
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if getattr(node.target, "__module__", "").endswith(_SENDING):
                refuse_to_send(str(node.target))


def reached_by_autograd(outputs: Iterable[torch.Tensor]) -> dict[int, None]:
    """The ids of the leaves, parameters among them, that the backward of these tensors comes to."""
    found: dict[int, None] = {}
    waiting: list[Any] = [output.grad_fn for output in outputs]
    found.update(dict.fromkeys(id(output) for output in outputs if output.grad_fn is None))
    seen: dict[Any, None] = {}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen[node] = None
        if hasattr(node, "variable"):
            found[id(node.variable)] = None
        waiting.extend(edge for edge, _ in node.next_functions)
    return found
