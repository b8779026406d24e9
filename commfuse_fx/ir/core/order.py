"""Put the nodes of a graph into another legal order."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from torch import fx


def reorder(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Make the nodes stand in this order. `order` holds every node of the graph once; the output comes last."""
    cursor = graph._root
    for node in order:
        if cursor.next is not node:
            cursor.append(node)
        cursor = node


def stable_sort(
    graph: fx.Graph, position: Mapping[fx.Node, float], before: Mapping[fx.Node, Sequence[fx.Node]]
) -> None:
    """Topological order that keeps nodes as close to `position` as their inputs and `before` allow.

    `before[node]` lists further nodes that must precede a node; entries that have left the graph are ignored.
    """
    nodes = list(graph.nodes)
    present = dict.fromkeys(nodes)
    users: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    missing: dict[fx.Node, int] = {}
    for node in nodes:
        needed = dict.fromkeys(node.all_input_nodes)
        needed.update((other, None) for other in before.get(node, ()) if other in present)
        missing[node] = len(needed)
        for other in needed:
            users[other].append(node)
    serial = {node: number for number, node in enumerate(nodes)}
    ready = [(position[node], serial[node]) for node in nodes if missing[node] == 0]
    heapq.heapify(ready)
    order: list[fx.Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)[1]]
        order.append(node)
        for user in users[node]:
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(ready, (position[user], serial[user]))
    assert len(order) == len(nodes), "the graph has a cycle"
    reorder(graph, order)


def nearest_above(before: Mapping[fx.Node, Sequence[fx.Node]], chosen: Sequence[fx.Node]) -> list[list[int]]:
    """For each of the chosen nodes, the indices of those chosen ones from which a path of `before` leads to it, through
    no other. `before` lists what must come before each node, nodes in a legal order; `chosen` are in that order too."""
    index = {node: i for i, node in enumerate(chosen)}
    nearest: dict[fx.Node, int] = {}  # as bitsets
    found: list[list[int]] = [[] for _ in chosen]
    for node, needed in before.items():
        bits = 0
        for other in needed:
            bits |= nearest[other]
        if node in index:
            found[index[node]] = _ones(bits)
            bits = 1 << index[node]
        nearest[node] = bits
    return found


def _ones(bits: int) -> list[int]:
    """The places of the bits that are set, ascending."""
    found: list[int] = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found
