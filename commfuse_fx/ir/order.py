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
