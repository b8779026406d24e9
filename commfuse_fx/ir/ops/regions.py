"""Regions of a graph: consecutive nodes that are compiled into one function."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program

aten = torch.ops.aten

_ONE_NUMBER = (aten.full.default, aten.ones.default, aten.scalar_tensor.default, aten.zeros.default)


@dataclass(frozen=True)
class Region:
    """A region is a set of nodes of one graph that run as one function.

    nodes: in the order of the graph.
    inputs: what they take from outside, in the order of its first use.
    outputs: what others take from them, in the order of the nodes.
    constants: nodes outside that hold one number, computed once. A compiler writes the number into its code, so they
        are no inputs.
    rounded: whether each number of half precision is rounded as the ops by themselves do (`NodeInfo.rounded`).
    """

    number: int
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    constants: tuple[fx.Node, ...] = ()
    rounded: bool = False


def regions_of(program: Program) -> list[Region]:
    """The regions that nodes are marked with (`NodeInfo.region`), in the order of the graph."""
    found: dict[int, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if (number := info(node).region) is not None:
            found.setdefault(number, []).append(node)
    return [_region(number, nodes) for number, nodes in found.items()]


def _region(number: int, nodes: Iterable[fx.Node]) -> Region:
    own = dict.fromkeys(nodes)
    taken = dict.fromkeys(value for node in own for value in node.all_input_nodes if value not in own)
    constants = [value for value in taken if info(value).once and value.target in _ONE_NUMBER]
    inputs = [value for value in taken if value not in constants]
    outputs = [node for node in own if any(user not in own for user in node.users)]
    rounded = any(info(node).rounded for node in own)
    return Region(number, tuple(own), tuple(inputs), tuple(outputs), tuple(constants), rounded)
