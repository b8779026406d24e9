"""Compute once what depends on nothing but shapes and constants: position ids, masks, scalar tensors.

Why: docs/decisions.md, "What no step changes is computed once, up to 64 MiB".
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from commfuse_fx.cost.memory import bytes_of
from commfuse_fx.ir.core.collectives import is_start
from commfuse_fx.ir.core.dependence import Roots
from commfuse_fx.ir.core.edit import erase_upwards, replace_all
from commfuse_fx.ir.core.meta import TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.equal_nodes import equality_key
from commfuse_fx.ir.ops.fixed_values import SHAPE_ONLY, fixed_nodes
from commfuse_fx.passes.declaration import Pass, Situation

aten = torch.ops.aten

_FILLED_WITH: dict[Any, int] = {
    aten.new_ones.default: 1,
    aten.new_zeros.default: 0,
    aten.ones_like.default: 1,
    aten.zeros_like.default: 0,
}


@dataclass(frozen=True)
class ComputeOnce(Pass):
    """The nodes stay in the graph and are marked. The first step computes them, and keeps the values that others need.

    at_most: bytes that are kept. What does not fit is computed in every step, and so is all that depends on it.
    """

    name = "compute_once"
    numerics = "bitwise"
    requires = ("simplified",)
    needs_sizes = True

    at_most: int = 64 << 20

    @classmethod
    def when(cls, situation: Situation) -> ComputeOnce | None:
        # Ranks whose batches differ come to one plan only if sizes decide nothing.
        return cls() if situation.same_batches else None

    def __call__(self, program: Program) -> bool:
        roots = Roots(program.graph, program.aliases())
        sent = [node for node in program.graph.nodes if is_start(node) or info(node).phase == "update"]
        taken = dict.fromkeys(roots[value] for node in sent for value in node.all_input_nodes)
        fixed = _closed([node for node in fixed_nodes(program) if roots[node] not in taken])
        same = _equal_ones(fixed)
        once = self._chosen(program, fixed, {node: roots[same.get(node, node)] for node in fixed})
        equal = {node: same[node] for node in once if node in same}
        replace_all(program, equal)
        for node in reversed(equal):
            program.graph.erase_node(node)
        once = [node for node in once if node not in equal]
        for node in once:
            info(node).once = True
        operands = [_make_from_nothing(node) for node in once if _needs_a_shape(node)]
        for operand in operands:
            if not operand._erased:
                erase_upwards(program, operand)
        return bool(once)

    def _chosen(self, program: Program, fixed: Sequence[fx.Node], memory: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
        """Of these nodes, those whose values fit, in the order of the graph. The last ones come first: kept is what is
        made of a value, not the value. memory: whose memory each one's value lies in."""
        while True:
            once: dict[fx.Node, None] = {}
            kept: dict[fx.Node, int] = {}
            for node in reversed(fixed):
                once[node] = None
                if not all(user in once for user in node.users):
                    root = memory[node]
                    kept[root] = 0 if root.op == "get_attr" else bytes_of(info(root).spec)
                    if sum(kept.values()) > self.at_most:
                        break
            else:
                for root, nbytes in reversed(kept.items()):
                    if nbytes:
                        program.note("computed once", info(root).name, f"{nbytes} bytes are kept")
                return [node for node in fixed if node.op != "get_attr"]
            large = memory[node]
            reason = f"compute_once keeps at most {self.at_most} bytes, and it takes {bytes_of(info(large).spec)}"
            program.note("computed in every step", info(large).name, reason)
            fixed = _closed([other for other in fixed if memory[other] is not large])


def _equal_ones(fixed: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The nodes that compute what an earlier one does, and that one. The phase does not matter: nothing is kept longer
    for its equal."""
    first: dict[Hashable, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    for node in fixed:
        kept = first.setdefault(equality_key(node, same), node)
        if kept is not node:
            same[node] = kept
    return same


def _closed(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Those that depend on no other node than these."""
    found: dict[fx.Node, None] = {}
    for node in nodes:
        inputs = node.all_input_nodes
        if all(value in found for value in (inputs[1:] if _may_forget_operand(node) else inputs)):
            found[node] = None
    return list(found)


def _may_forget_operand(node: fx.Node) -> bool:
    spec = info(node).spec
    return node.target in SHAPE_ONLY and isinstance(spec, TensorSpec) and spec.is_contiguous


def _needs_a_shape(node: fx.Node) -> bool:
    """Whether a node asks one for its shape that is computed in every step."""
    return node.target in SHAPE_ONLY and not any(info(v).once or v.op == "get_attr" for v in node.all_input_nodes[:1])


def _make_from_nothing(node: fx.Node) -> fx.Node:
    """Let a node that asks another one for its shape do without it; returns that one."""
    spec, operand = tensor_spec(node), node.all_input_nodes[0]
    value: Any = _FILLED_WITH.get(node.target, node.args[-1])
    node.target = aten.full.default
    node.args = (list(spec.shape), value)
    node.kwargs = {"dtype": spec.dtype, "device": torch.device(spec.device), "pin_memory": False}
    info(node).declared = True
    return operand
