"""Let ops overwrite an input that nobody needs any more, as eager programs do: less memory, fewer cache misses.

Runs after scheduling, because who needs what later depends on the order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.collectives import IN_PLACE, is_wait, memory_on_wire
from commfuse_fx.ir.dependence import Roots
from commfuse_fx.ir.halves import lasting
from commfuse_fx.ir.meta import TensorSpec, info
from commfuse_fx.ir.program import Program
from commfuse_fx.kernels.masks import bernoulli, bernoulli_
from commfuse_fx.passes.declaration import Pass

aten = torch.ops.aten

_IN_PLACE: dict[Any, Any] = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.add.Scalar: aten.add_.Scalar,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.mul.Scalar: aten.mul_.Tensor,  # mul_.Scalar first rounds the number to the tensor's dtype, mul.Scalar does not
    aten.div.Tensor: aten.div_.Tensor,
    aten.div.Scalar: aten.div_.Scalar,
    aten.neg.default: aten.neg_.default,
    aten.relu.default: aten.relu_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.masked_fill.Tensor: aten.masked_fill_.Tensor,
    aten.bernoulli.p: aten.bernoulli_.float,
    bernoulli: bernoulli_,
    **IN_PLACE,
}


@dataclass(frozen=True)
class Reinplace(Pass):
    """Bitwise neutral: the in-place variant computes the same."""

    name = "reinplace"
    numerics = "bitwise"
    requires = ("averaged",)

    def __call__(self, program: Program) -> bool:
        return reinplace(program, Roots(program.graph, program.aliases()))


def reinplace(program: Program, roots: Roots) -> bool:
    """The pass, for a caller that knows the program's roots. Returns whether anything changed."""
    last_use: dict[fx.Node, int] = {}
    candidates: list[tuple[int, fx.Node]] = []
    for i, node in enumerate(program.graph.nodes):
        for value in node.all_input_nodes:
            last_use[roots[value]] = i
        if is_wait(node) and (sent := memory_on_wire(node)) is not None:
            last_use[roots[sent]] = i
        if node.op != "call_function" or info(node).once or info(node).region is not None:
            continue
        if node.target in _IN_PLACE and isinstance(node.args[0], fx.Node):
            candidates.append((i, node))
    for value in lasting(program):
        last_use[roots[value]] = len(program.graph.nodes)
    modified = False
    # `merged` follows memory that has been handed on: the result of an in-place op lives in its input's memory.
    merged: dict[fx.Node, fx.Node] = {}

    def root_of(node: fx.Node) -> fx.Node:
        root = roots[node]
        while root in merged:
            root = merged[root]
        return root

    for position, node in candidates:
        operand = node.args[0]
        assert isinstance(operand, fx.Node)
        root = root_of(operand)
        if last_use[root] > position or not _may_overwrite(node, operand, root):
            continue
        if any(root_of(other) is root for other in node.all_input_nodes if other is not operand):
            continue
        node.target = _IN_PLACE[node.target]
        own = root_of(node)
        if own is not root:
            merged[own] = root
            last_use[root] = max(last_use.get(root, 0), last_use.get(own, 0))
        modified = True
    return modified


def _may_overwrite(node: fx.Node, operand: fx.Node, root: fx.Node) -> bool:
    """The operand is all of a block of memory that the step made itself, and the result has the same layout."""
    have, want = info(operand).spec, info(node).spec
    if not isinstance(have, TensorSpec) or have != want or not have.is_dense:
        return False
    return root.op == "call_function" and not info(root).once
