"""How much of an update each rank does on the average, where one rank alone updates a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from commfuse_fx.ir.core.meta import TensorSpec, info
from commfuse_fx.ir.core.owner_ops import of_owner

aten = torch.ops.aten

_ELEMENTWISE = (aten.mul.Tensor, aten.mul_.Tensor, aten._to_copy.default)
"""What a gradient that is clipped goes through ahead of the update."""


def share_of_rank(node: fx.Node) -> float:
    """The part of its elements that an op of an update has on a rank: 1 where every rank works on all of its own, and
    what is the average over the ranks where one rank alone owns them."""
    if node.target is of_owner:
        return 1 / _ways(node)
    if info(node).phase != "update" or not node.graph.find_nodes(op="call_function", target=of_owner, sort=False):
        return 1.0
    for each in _of_same_update(node):
        for values in _operands(each):
            if any(_ways(value) > 1 for value in values):
                sizes = [(value, _numel(value)) for value in values]
                return sum(size / _ways(value) for value, size in sizes) / max(sum(size for _, size in sizes), 1)
    return 1.0


def _ways(value: fx.Node) -> int:
    """How many ranks share what one of them owns of a value; 1 for what every rank has."""
    while value.target in _ELEMENTWISE and info(value).phase == "update":
        value = value.all_input_nodes[0]
    if value.target is not of_owner:
        return 1
    ways = value.args[2]
    assert isinstance(ways, int)
    return ways


def _operands(node: fx.Node) -> Iterator[Sequence[fx.Node]]:
    """The lists of tensors that an op takes, or else its first tensor."""
    lists = [[item for item in arg if isinstance(item, fx.Node)] for arg in node.args if isinstance(arg, (list, tuple))]
    yield from lists or [node.all_input_nodes[:1]]


def _of_same_update(node: fx.Node) -> Iterator[fx.Node]:
    """A node, and then the others of its update, nearest first: some of them work on nothing but states."""
    update, separator, _ = info(node).name.partition("/")
    inside = (f"{update}/", f"{update}.") if separator and update.startswith("update.") else ()
    found = {node: None}
    waiting = [node]
    for each in waiting:
        yield each
        for other in (*each.all_input_nodes, *each.users) if inside else ():
            if other not in found and info(other).name.startswith(inside):
                found[other] = None
                waiting.append(other)


def _numel(value: fx.Node) -> int:
    spec = info(value).spec
    return spec.numel if isinstance(spec, TensorSpec) else 0
