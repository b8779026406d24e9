"""Which outputs of a graph are views of others or of its arguments, and the ops that make them.

What is changed in place afterwards has to reach all that share memory. Autograd knows this of views that ops of its own
have made, and not of outputs of a compiled graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Views:
    """kept: the positions of outputs that the compiled graph returns: those that are no views, and what is viewed.

    arguments: the positions of the arguments that are viewed.
    made: takes these arguments and the outputs that are kept, and returns all.
    """

    kept: Sequence[int]
    arguments: Sequence[int]
    made: fx.GraphModule

    def outputs(self, arguments: Sequence[Any], kept: Sequence[Any]) -> Any:
        """All outputs of a call with these arguments."""
        return self.made(*(arguments[place] for place in self.arguments), *kept)


class UnknownViews(Exception):
    """Outputs share memory, and their views cannot be made again: they were changed in place, say."""


def views_of(graph: fx.GraphModule, changed: Collection[fx.Node]) -> Views | None:
    """The views among the outputs of a graph that Dynamo has made; None if there are none. Raises UnknownViews.

    What is viewed becomes one more output of the graph where it is none, and so do sizes that views need. changed: the
    arguments that the graph changes in place.
    """
    (end,) = (node for node in graph.graph.nodes if node.op == "output")
    outputs: list[Any] = tree_leaves(end.args)
    memory = _Memory(graph, changed)
    again: dict[fx.Node, None] = {}
    roots: dict[fx.Node, None] = {}
    for number in dict.fromkeys(number for node in outputs for number in memory.of(node)):
        sharing = [node for node in dict.fromkeys(outputs) if number in memory.of(node)]
        root = memory.root(number)
        if len(sharing) > 1 or root.op == "placeholder":
            roots[root] = None
            for node in sharing:
                again.update(dict.fromkeys(memory.way_to(node, number)))
    if not again:
        return None
    sizes = dict.fromkeys(value for node in again for value in node.all_input_nodes if _is_number(value))
    every = [*outputs, *(each for each in (*roots, *sizes) if each not in outputs and each.op != "placeholder")]
    kept = [place for place, node in enumerate(every) if node not in again]
    if not kept or any(node.target is torch._C._set_grad_enabled for node in graph.graph.nodes):
        raise UnknownViews
    arguments, made = _made(graph, end, [every[place] for place in kept], list(again))
    end.args = (tuple(every),)
    graph.recompile()
    return Views(kept, arguments, made)


class _Memory:
    """Which nodes have memory in common, by the number of the memory."""

    def __init__(self, graph: fx.GraphModule, changed: Collection[fx.Node]) -> None:
        self._changed = changed
        self._roots: dict[int, fx.Node] = {}
        self._order = {node: number for number, node in enumerate(graph.graph.nodes)}
        for node in graph.graph.nodes:
            if isinstance(_example(node), torch.Tensor):
                for number in _memory_of(node):
                    self._roots.setdefault(number, node)

    def root(self, number: int) -> fx.Node:
        """The first node that is a tensor with this memory. Raises UnknownViews if there is none."""
        if number not in self._roots:
            raise UnknownViews
        return self._roots[number]

    def of(self, node: Any) -> tuple[int, ...]:
        """That of a parameter does not count: its views belong to the graph."""
        found = dict.fromkeys(_memory_of(node)) if isinstance(node, fx.Node) else ()
        return tuple(each for each in found if not isinstance(_example(self.root(each)), nn.Parameter))

    def way_to(self, node: fx.Node, number: int) -> Sequence[fx.Node]:
        """The ops that make a view, in order, without the first node of its memory. Raises UnknownViews."""
        root, to_do = self.root(number), [node]
        way: dict[fx.Node, None] = {}
        if root in self._changed if root.op == "placeholder" else _was_changed(root):
            raise UnknownViews
        while to_do:
            each = to_do.pop()
            if each is root or each in way or _is_number(each):
                continue
            if self.of(each) != (number,) or each.op not in ("call_function", "call_method"):
                raise UnknownViews
            way[each] = None
            to_do.extend(each.all_input_nodes)
        return sorted(way, key=self._order.__getitem__)


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _was_changed(node: fx.Node) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf._version > 0 for leaf in tree_leaves(_example(node)))


def _is_number(node: fx.Node) -> bool:
    return isinstance(_example(node), (int, float, *_NUMBERS_OF_ANY_SIZE))


_NUMBERS_OF_ANY_SIZE = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _memory_of(node: fx.Node) -> Iterator[int]:
    for leaf in tree_leaves(_example(node)):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            yield leaf.untyped_storage()._cdata


def _made(
    graph: fx.GraphModule, end: fx.Node, kept: Sequence[fx.Node], again: Sequence[fx.Node]
) -> tuple[list[int], fx.GraphModule]:
    """The positions of the arguments that are viewed, and what makes the outputs."""
    needed = {*end.all_input_nodes, *(read for node in again for read in node.all_input_nodes)}
    arguments = [node for node in graph.graph.nodes if node.op == "placeholder"]
    places = [place for place, node in enumerate(arguments) if node in needed]
    copy = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for number, node in enumerate((*(arguments[place] for place in places), *kept)):
        known[node] = copy.placeholder(f"given_{number}")
    for node in again:
        known[node] = copy.node_copy(node, known.__getitem__)
        known[node].meta.pop("example_value")
    copy.output(fx.node.map_arg(end.args[0], known.__getitem__))
    return places, fx.GraphModule(graph, copy)
