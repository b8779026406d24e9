"""The nodes of parameter updates, and the gradients that they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.rows.shard_rows import is_parameter

SCALARS = ("step", "mu_product", "eta", "mu")
"""States of optimizers that are one number per parameter."""


def is_scalar(state: str) -> bool:
    """Whether an input of this name is a list of such numbers, one of each segment (`step`) or all (`steps`)."""
    return state.removesuffix("s") in SCALARS


aten = torch.ops.aten

_SCALES = (aten.mul.Tensor, aten.mul_.Tensor)


def update_nodes(program: Program) -> list[list[fx.Node]]:
    """For each update the nodes that emit_update made for it."""
    nodes: list[list[fx.Node]] = [[] for _ in program.updates]
    prefixes = {f"update.{owner}": owner for owner in range(len(program.updates))}
    for node in program.graph.nodes:
        if node.op == "call_function":
            prefix, _, rest = info(node).name.partition("/")
            if rest and prefix in prefixes:
                nodes[prefixes[prefix]].append(node)
    return nodes


def is_node_list(arg: Any) -> bool:
    return isinstance(arg, (list, tuple)) and bool(arg) and all(isinstance(item, fx.Node) for item in arg)


def gradients_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The list of gradients that an update takes; `nodes`: those of the update."""
    for node in nodes:
        for arg in node.args:
            if is_node_list(arg) and not all(is_parameter(item) for item in arg):  # type: ignore[union-attr, arg-type]
                return list(arg)  # type: ignore[arg-type]
    raise LookupError("an update has no gradients")


def unclipped(grad: fx.Node) -> fx.Node:
    """What an update would take if no gradient were clipped: the factor of a product that clips it, or itself."""
    if grad.target not in _SCALES or info(grad).phase != "update":
        return grad
    factor, coefficient = grad.args
    return factor if isinstance(factor, fx.Node) and isinstance(coefficient, fx.Node) else grad
