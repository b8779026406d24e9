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

from commfuse_fx.errors import VerificationError
from commfuse_fx.ir.collectives import is_start, is_wait
from commfuse_fx.ir.declared_specs import difference, is_declared
from commfuse_fx.ir.dependence import Roots, is_opaque, is_view
from commfuse_fx.ir.meta import Spec, info, same_layout, spec_of
from commfuse_fx.ir.program import Program


class LayoutCheck:
    """`functions[node]` gives what the node has computed as it is recorded. `copied` are the nodes that needed it."""

    def __init__(self, program: Program) -> None:
        self.functions = {node: self._function(node) for node in computed(program)}
        self.functions.update({node: proven(node) for node in program.graph.nodes if _can_only_be_proven(node)})
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


def proven(node: fx.Node) -> Callable[[Any], Any]:
    """Gives on what the node has made, if that is what the pass that added the node has declared.

    Raises VerificationError otherwise: of a view no copy can be made, since others may write to its memory.
    """
    declared = info(node).spec

    def prove(value: Any) -> Any:
        if (wrong := difference(declared, spec_of(value))) is not None:
            where = f" ({info(node).source})" if info(node).source else ""
            raise VerificationError(f"node {info(node).name}{where} {wrong}: a pass has made a wrong record")
        return value

    return prove


def _can_only_be_proven(node: fx.Node) -> bool:
    """Views that passes have added, but for those of the next step, whose results are always handed on."""
    return (
        is_declared(node)
        and is_view(node)
        and node.target is not operator.getitem
        and not (is_start(node) or is_wait(node))
        and info(node).next_step is None
    )


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
