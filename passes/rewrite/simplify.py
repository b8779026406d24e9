"""Remove what tracing leaves behind: detaches, transposes and conjugates that cancel, and dead nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from commfuse_fx.ir.builder import Builder
from commfuse_fx.ir.dependence import is_view
from commfuse_fx.ir.edit import IDENTITIES, remove_dead_nodes, replace_all
from commfuse_fx.ir.meta import info
from commfuse_fx.ir.program import Program
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
        replacements |= _cancel_conjugates(program)
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


def _cancel_conjugates(program: Program) -> dict[fx.Node, fx.Node]:
    """Replace the conjugate of views of a conjugate by these views of what was conjugated.

    `.real` and `.imag` of a conjugate read the memory of such a value, which torch allows as long as nothing has
    computed the first of the two: a rank that gets it from others has.
    """
    build, found = Builder(program), {}
    for node in [node for node in program.graph.nodes if node.target is aten._conj.default]:
        views: list[fx.Node] = []
        value = node.args[0]
        while is_view(value) and value.target is not aten._conj.default:
            views.append(value)
            value = value.args[0]
        if value.target is not aten._conj.default:
            continue
        value = value.args[0]
        with build.before(node):
            for view in reversed(views):
                like = info(view)
                value = build.call(
                    view.target,
                    (value, *view.args[1:]),
                    view.kwargs,
                    spec=like.spec,
                    like=like,
                    name=f"{like.name}/conj",
                )
        replace_all(program, {node: value})
        found[node] = value
    return found
