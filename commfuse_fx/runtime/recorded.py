"""Values lie in memory as the graph says of them, whatever a kernel has made.

A graph is recorded on tensors without data, whose strides follow from a description of each op. Some kernels lay their
results out otherwise. Autograd, passes and kernels that read memory in its order rely on the record: where it says that
a value is contiguous, the copy that would make it so is not in the graph. Strides do not depend on the numbers in a
tensor, so one run shows for which nodes a copy is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.collectives import is_start
from commfuse_fx.ir.dependence import Roots, is_opaque
from commfuse_fx.ir.meta import Spec, info, same_layout
from commfuse_fx.ir.program import Program


class LayoutCheck:
    """`functions[node]` gives what the node has computed as it is recorded. `copied` are the nodes that needed it."""

    def __init__(self, program: Program) -> None:
        self.functions = {node: self._function(node) for node in computed(program)}
        self.copied: dict[fx.Node, None] = {}

    def needless(self) -> list[fx.Node]:
        """After a run: the nodes of the step itself whose results lay as they are recorded."""
        return [node for node in self.functions if node not in self.copied and info(node).next_step is None]

    def _function(self, node: fx.Node) -> Callable[[Any], Any]:
        spec = info(node).spec

        def check(value: Any) -> Any:
            laid_out = as_recorded(value, spec)
            if laid_out is not value:
                self.copied[node] = None
            return laid_out

        return check


def computed(program: Program) -> dict[fx.Node, None]:
    """The nodes whose results have memory of their own, which nobody else knows: no views, nothing on the wire."""
    roots = Roots(program.graph, program.aliases())
    return {
        node: None
        for node in program.graph.nodes
        if node.op == "call_function"
        and roots[node] is node
        and info(node).spec is not None
        and not (node.target is operator.getitem or is_start(node) or is_opaque(node) or info(node).kept)
    }


def as_recorded(value: Any, spec: Spec) -> Any:
    """`value` itself where it lies as the spec says, else a copy that does."""
    if isinstance(spec, tuple):
        items = [as_recorded(item, own) for item, own in zip(value, spec, strict=True)]
        return value if all(made is item for made, item in zip(items, value, strict=True)) else items
    if spec is None or value is None or value.layout != torch.strided:
        return value
    if same_layout(spec.shape, value.stride(), spec.stride):
        return value
    memory = torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=value.device)
    return memory.copy_(value)
