"""Which outputs of a model are computed from others of its outputs, as autograd sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

Edge = tuple[Any, int]


def computed_from(outputs: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """For each output the numbers of the others whose gradients flow through it. A tensor that is two outputs is
    computed from itself."""
    edges = {i: _edge_of(output) for i, output in enumerate(outputs) if output.requires_grad}
    found: list[list[int]] = [[] for _ in outputs]
    if len(edges) < 2:
        return tuple(() for _ in outputs)
    for other, begin in edges.items():
        reached = _reached_from(begin)
        for number, edge in edges.items():
            if number != other and edge in reached:
                found[number].append(other)
    return tuple(tuple(others) for others in found)


def _edge_of(output: torch.Tensor) -> Edge:
    edge = get_gradient_edge(output)
    return edge.node, edge.output_nr


def _reached_from(begin: Edge) -> dict[Edge, None]:
    found = {begin: None}
    expanded: dict[Any, None] = {}
    left = [begin[0]]
    while left:
        node = left.pop()
        if node in expanded:
            continue
        expanded[node] = None
        for edge in node.next_functions:
            if edge[0] is not None:
                found[edge] = None
                left.append(edge[0])
    return found
