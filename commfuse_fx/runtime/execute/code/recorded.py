"""Results of kernels get the strides that the graph has recorded for them.

A graph is recorded on tensors without data, whose strides follow from a description of each op. Some kernels return
other strides. Autograd, passes and some kernels rely on the record: if it says that a value is contiguous, the graph
does not copy it. Strides do not depend on the values of a tensor, so one run shows which nodes need a copy.

Why: docs/decisions.md, "What a graph says of strides is made true when it runs".
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from commfuse_fx.errors import VerificationError
from commfuse_fx.ir.core.collectives import is_start, is_wait
from commfuse_fx.ir.core.declared_specs import difference, is_declared
from commfuse_fx.ir.core.dependence import Roots, is_opaque, is_view, written_nodes
from commfuse_fx.ir.core.meta import Spec, TensorSpec, info, same_layout, spec_of, tensor_spec
from commfuse_fx.ir.core.program import Program


def laid_out_otherwise(program: Program, values: Sequence[Any]) -> list[tuple[int, TensorSpec]]:
    """Places and specs of the inputs whose strides are not the recorded ones. values: those of the placeholders.

    A divided graph, for example, expects a contiguous part of the batch. Inputs that the step writes to are left out.
    """
    roots = Roots(program.graph, program.aliases())
    written = dict.fromkeys(roots[value] for node in program.graph.nodes for value in written_nodes(node))
    return [
        (place, tensor_spec(node))
        for place, ((node, source), value) in enumerate(zip(program.sources.items(), values, strict=True))
        if source.kind == "input" and node not in written and as_recorded(value, info(node).spec) is not value
    ]


class LayoutCheck:
    """A layout check copies results of some nodes whose strides differ from the record, and notes for which nodes.

    functions: for each checked node a function from its result to the result with the recorded strides.
    copied: the nodes whose results were copied.
    """

    def __init__(self, program: Program, among: Iterable[fx.Node]) -> None:
        made = computed(program)
        self.functions: dict[fx.Node, Callable[[Any], Any]] = {}
        for node in among:
            if info(node).once:
                continue
            if node in made:
                self.functions[node] = self._function(node)
            elif _can_only_be_proven(node):
                self.functions[node] = proven(node)
        self.copied: dict[fx.Node, None] = {}

    def needless(self) -> list[fx.Node]:
        """After a run: the checked nodes whose results had the recorded strides, without those of the tail."""
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
    """A function that checks the node's result against the spec that a pass has declared, and returns it unchanged.

    It raises VerificationError if they differ. A copy would not do: other nodes may write to the memory of a view.
    """
    declared = info(node).spec

    def prove(value: Any) -> Any:
        if (wrong := difference(declared, _spec_made(value, declared))) is not None:
            where = f" ({info(node).source})" if info(node).source else ""
            raise VerificationError(f"node {info(node).name}{where} {wrong}: a pass has made a wrong record")
        return value

    return prove


def _can_only_be_proven(node: fx.Node) -> bool:
    """Whether the node is a view that a pass has added. The tail is left out, as its checks would run in every step."""
    return (
        is_declared(node)
        and is_view(node)
        and node.target is not operator.getitem
        and not (is_start(node) or is_wait(node))
        and info(node).next_step is None
    )


def computed(program: Program) -> dict[fx.Node, None]:
    """The nodes whose results are tensors in new memory: no views, and no results of collectives."""
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
    """Returns `value` if it has the strides of the spec, else a copy that has them."""
    if isinstance(spec, tuple):
        items = [as_recorded(item, own) for item, own in zip(value, spec, strict=True)]
        return value if all(made is item for made, item in zip(items, value, strict=True)) else items
    if spec is None or value is None or value.layout != torch.strided:
        return value
    if _has_nothing(value) or same_layout(spec.shape, value.stride(), spec.stride):
        return value
    memory = torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=value.device)
    return memory.copy_(value)


def _spec_made(value: Any, declared: Spec) -> Spec:
    if isinstance(value, (list, tuple)) and isinstance(declared, tuple) and len(value) == len(declared):
        return tuple(map(_spec_made, value, declared))
    return declared if _has_nothing(value) else spec_of(value)


def _has_nothing(value: Any) -> bool:
    """Whether it has no elements, and so lies as anything does: of what another rank owns, this one has none."""
    return isinstance(value, torch.Tensor) and value.numel() == 0
