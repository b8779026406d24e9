"""Edits of a graph that passes share: nodes replaced by others, and removed where nothing uses them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import fx

from commfuse_fx.ir.core.collectives import is_wait, role_of
from commfuse_fx.ir.core.declared_specs import declare_anew
from commfuse_fx.ir.core.dependence import is_opaque, written_nodes
from commfuse_fx.ir.core.meta import TensorSpec, info, same_layout
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.random_draws import draws_random_numbers

aten = torch.ops.aten

ALIASES = (aten.detach.default, aten.alias.default)
IDENTITIES = (*ALIASES, aten.lift_fresh_copy.default, aten.lift_fresh.default)


def replace(program: Program, node: fx.Node, replacement: fx.Node) -> None:
    """Let everything that refers to `node`, the program's outputs included, refer to `replacement`."""
    replace_all(program, {node: replacement})


def replace_all(program: Program, replacements: Mapping[fx.Node, fx.Node]) -> None:
    """The same for many nodes at once, one visit per user: updates have lists of thousands of gradients.

    A replacement may be replaced itself. Where one lies otherwise than what it replaces, so does what passes have made
    of that: it is declared anew.
    """

    def final(node: fx.Node) -> fx.Node:
        while node in replacements:
            node = replacements[node]
        return node

    laid_otherwise = [user for node in replacements if _lies_otherwise(node, final(node)) for user in node.users]
    for user in dict.fromkeys(user for node in replacements for user in node.users):
        user.args = fx.node.map_arg(user.args, final)
        if user.kwargs:
            user.kwargs = fx.node.map_arg(user.kwargs, final)
    program.loss = final(program.loss)
    if program.grads:
        program.grads = {name: final(grad) for name, grad in program.grads.items()}
    program.aux = {name: final(node) for name, node in program.aux.items()}
    declare_anew(laid_otherwise)


def _lies_otherwise(node: fx.Node, replacement: fx.Node) -> bool:
    """Whether memory has the elements in another order."""
    one, other = info(node).spec, info(replacement).spec
    if not isinstance(one, TensorSpec) or not isinstance(other, TensorSpec) or one.shape != other.shape:
        return False
    return not same_layout(one.shape, one.stride, other.stride)


def replace_members(program: Program, replacements: Mapping[fx.Node, fx.Node]) -> None:
    """Let fused collectives refer to replacements of their members: what one bucket gives may be what another sends."""
    for start in program.collectives():
        info(start).parts = tuple(
            dataclasses.replace(part, value=replacements.get(part.value, part.value)) for part in info(start).parts
        )


def remove_dead_nodes(program: Program) -> bool:
    """Erase nodes without users and effects. Random draws stay: they advance the generator as in eager execution."""
    removed = False
    for node in reversed(list(program.graph.nodes)):
        if not node.users and not _has_effect(node):
            program.graph.erase_node(node)
            removed = True
    return removed


def erase_upwards(program: Program, node: fx.Node) -> None:
    """Erase a node that is no longer used, and then its inputs as far as nothing else uses them."""
    pending = [node]
    while pending:
        node = pending.pop()
        if not node.users and not _has_effect(node):
            inputs = node.all_input_nodes
            program.graph.erase_node(node)
            pending.extend(inputs)


def _has_effect(node: fx.Node) -> bool:
    if node.op not in ("call_function", "get_attr"):
        return True
    if is_wait(node):
        return _is_users(node.all_input_nodes[0])  # else that of a collective that works on its own memory
    return _is_users(node) or bool(written_nodes(node)) or is_opaque(node) or draws_random_numbers(node)


def _is_users(start: fx.Node) -> bool:
    """A collective that somebody has written stays, whoever needs its result."""
    return role_of(start) == "user"


def forget_erased(graph: fx.Graph) -> None:
    """Let go of the nodes that passes have erased: the graph keeps every node that it has named. It has to know names
    only, so that it gives none of them twice."""
    graph._graph_namespace._obj_to_name.clear()
