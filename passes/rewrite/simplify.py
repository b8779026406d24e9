"""Remove what tracing leaves behind: detaches, transposes that cancel, and dead nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from commfuse_fx.ir.core.edit import IDENTITIES, remove_dead_nodes, replace_all
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import Pass

aten = torch.ops.aten


@dataclass(frozen=True)
class Simplify(Pass):
    """Numerics stay bitwise the same."""

    name = "simplify"
    numerics = "bitwise"
    ensures = ("simplified",)

    def __call__(self, program: Program) -> bool:
        replacements: dict[fx.Node, fx.Node] = {}
        for node in program.graph.nodes:
            replacement = _replacement(node, replacements)
            if replacement is not None:
                replacements[node] = replacements.get(replacement, replacement)
        replace_all(program, replacements)
        return remove_dead_nodes(program) or bool(replacements)


def _replacement(node: fx.Node, earlier: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = earlier.get(node.args[0], node.args[0])
    if node.target in IDENTITIES:
        # A constant of the graph must not be handed out as a value that somebody may write to.
        return None if source.op == "get_attr" else source
    if node.target is aten.t.default and source.target is aten.t.default:
        return source.args[0]  # type: ignore[return-value]
    if (
        node.target is aten.transpose.int
        and source.target is aten.transpose.int
        and frozenset(node.args[1:]) == frozenset(source.args[1:])
    ):
        return source.args[0]  # type: ignore[return-value]
    if node.target in (aten.view.default, aten._unsafe_view.default) and info(node).spec == info(source).spec:
        return source
    return None
