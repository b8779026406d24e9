"""Compute equal values once: models build the same mask, its conversion and its index in every layer.

Why: docs/decisions.md, "Equal nodes merge, but not those of the forward with those of the backward".
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass

from torch import fx

from commfuse_fx.cost.memory import bytes_of
from commfuse_fx.ir.core.dependence import Roots, is_view
from commfuse_fx.ir.core.edit import replace_all
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.random_draws import draws_random_numbers
from commfuse_fx.ir.ops.equal_nodes import equality_key
from commfuse_fx.ir.ops.fixed_values import fixed_nodes, written_or_handed_out
from commfuse_fx.ir.ops.unwritten import is_unwritten
from commfuse_fx.passes.declaration import Pass, Situation


@dataclass(frozen=True)
class MergeEqual(Pass):
    """Nodes merge that call the same op with the same arguments, in one phase: a value that the backward computes again
    is not kept from the forward.

    at_most: bytes of a value that is kept longer for its equals. A larger one merges only where it is alive there
        anyhow, or depends on nothing but shapes and constants.
    """

    name = "merge_equal"
    numerics = "bitwise"
    requires = ("simplified",)
    needs_sizes = True

    at_most: int = 65536

    @classmethod
    def when(cls, situation: Situation) -> MergeEqual | None:
        # Each use of a value in a divided graph may want a layout of its own.
        if situation.divides:
            return None
        # Ranks whose batches differ come to one plan only if sizes decide nothing.
        return cls() if situation.same_batches else cls(at_most=0)

    def __call__(self, program: Program) -> bool:
        roots = Roots(program.graph, program.aliases())
        shared = dict.fromkeys(roots[node] for node in written_or_handed_out(program))
        fixed = fixed_nodes(program)
        last_use = {roots[value]: at for at, node in enumerate(program.graph.nodes) for value in node.all_input_nodes}
        first: dict[Hashable, fx.Node] = {}
        merged: dict[fx.Node, fx.Node] = {}
        for at, node in enumerate(program.graph.nodes):
            if not _is_pure(node) or any(roots[value] in shared for value in (node, *node.all_input_nodes)):
                continue
            key = (info(node).phase, equality_key(node, merged))
            kept = first.setdefault(key, node)
            if kept is node:
                continue
            root, own = roots[kept], roots[node]
            cheap = node in fixed or is_view(node) or bytes_of(info(node).spec) <= self.at_most
            if cheap or last_use.get(root, -1) >= at:
                merged[node] = kept
                last_use[root] = max(last_use.get(root, -1), last_use.get(own, -1))
            else:
                first[key] = node
        replace_all(program, merged)
        for node in reversed(merged):
            program.graph.erase_node(node)
        return bool(merged)


def _is_pure(node: fx.Node) -> bool:
    if node.op != "call_function" or info(node).spec is None or info(node).phase == "update":
        return False
    if node.target is operator.getitem:
        return True
    known = getattr(node.target, "namespace", "") in ("aten", "prims")
    return known and not (draws_random_numbers(node) or is_unwritten(node))
