"""What must come before what: data, mutation and effects.

Graphs mix pure ops with in-place ones (a gradient written into its bucket, an all_reduce in place, a
fused parameter update). Views share the memory of their base, so each node gets a *root*: the node
whose memory it reads or writes. Order between nodes follows from reads and writes of roots, as in any
compiler: a write waits for earlier reads and writes, a read for earlier writes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.collectives import WAIT, memory_on_wire
from commfuse_fx.ir.random_draws import can_draw, draws_random_numbers

_IN_FLIGHT_RNG = object()


@cache
def _alias_of_returns(target: Any) -> bool:
    """True for ops that return memory of their first argument: views, and in-place ops."""
    if target is torch.ops.aten._unsafe_view.default:  # its schema hides it from autograd
        return True
    schema = getattr(target, "_schema", None)
    return schema is not None and any(ret.alias_info is not None for ret in schema.returns)


@cache
def _written_arguments(target: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an op writes."""
    if target is WAIT:
        return ((0, "tensor"),)
    schema = getattr(target, "_schema", None)
    if schema is None:
        return ()
    return tuple(
        (i, arg.name)
        for i, arg in enumerate(schema.arguments)
        if arg.alias_info is not None and arg.alias_info.is_write
    )


def is_view(node: fx.Node) -> bool:
    """True when the node only gives another shape or part to existing memory, and writes nothing."""
    if node.target is operator.getitem:
        return True
    return node.op == "call_function" and _alias_of_returns(node.target) and not _written_arguments(node.target)


def is_opaque(node: fx.Node) -> bool:
    """A Python function whose effects nobody knows: nothing moves across it."""
    return node.op == "call_function" and _is_opaque_op(node.target)


def _is_opaque_op(target: Any) -> bool:
    return (
        not hasattr(target, "_schema")
        and getattr(target, "__module__", "") not in ("_operator", "operator", "math")
        and not getattr(target, "commfuse_pure", False)
    )


def _nodes_in(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(value, lambda node: found.append(node))
    return found


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory this node writes."""
    if node.op != "call_function":
        return []
    found: list[fx.Node] = []
    for position, name in _written_arguments(node.target):
        value = node.kwargs[name] if name in node.kwargs else node.args[position] if position < len(node.args) else None
        found.extend(_nodes_in(value))
    return found


@dataclass(frozen=True, slots=True)
class _Traits:
    """What an op says of all nodes that call it. Looked up once per node: hashing an op is slow."""

    view: bool
    aliases: bool
    writes: bool
    can_draw: bool
    opaque: bool


_NO_CALL = _Traits(view=False, aliases=False, writes=False, can_draw=False, opaque=False)


@cache
def _traits_of(target: Any) -> _Traits:
    writes = bool(_written_arguments(target))
    aliases = _alias_of_returns(target)
    return _Traits(
        view=target is operator.getitem or (aliases and not writes),
        aliases=aliases,
        writes=writes,
        can_draw=can_draw(target),
        opaque=_is_opaque_op(target),
    )


class Roots:
    """The memory that each node refers to. `aliases` maps placeholders onto the placeholder whose memory they share."""

    def __init__(self, graph: fx.Graph, aliases: Mapping[fx.Node, fx.Node] | None = None) -> None:
        self._root: dict[fx.Node, fx.Node] = {}
        aliases = aliases or {}
        for node in graph.nodes:
            self._root[node] = self._find(node) if node.op == "call_function" else aliases.get(node, node)

    def __getitem__(self, node: fx.Node) -> fx.Node:
        return self._root[node]

    def _find(self, node: fx.Node) -> fx.Node:
        if node.target is operator.getitem:
            source = node.args[0]
            if not isinstance(source, fx.Node):
                return node
            # An op with several results makes them separately; a view with several parts does not.
            return self._root[source] if self._root[source] is not source or source.op == "placeholder" else node
        if node.target is WAIT:
            return self._root[node.args[0]]  # type: ignore[index]
        traits = _traits_of(node.target)
        if traits.aliases and node.all_input_nodes:
            written = written_nodes(node) if traits.writes else ()
            return self._root[written[0] if written else node.all_input_nodes[0]]
        return node


class Dependence:
    """Dependence says in which order nodes have to stay.

    direct: for each node, the nodes that must come before it, in graph order, each once.
    """

    def __init__(self, graph: fx.Graph, aliases: Mapping[fx.Node, fx.Node] | None = None) -> None:
        self.roots = Roots(graph, aliases)
        self.direct: dict[fx.Node, list[fx.Node]] = {}
        roots = self.roots
        writer: dict[Any, fx.Node] = {}  # the last one
        readers: dict[Any, list[fx.Node]] = {}
        barrier: fx.Node | None = None
        since_barrier: list[fx.Node] = []
        for node in graph.nodes:
            inputs = node.all_input_nodes
            traits = _traits_of(node.target) if node.op == "call_function" else _NO_CALL
            before: dict[fx.Node, None] = dict.fromkeys(inputs)
            written: dict[Any, None] = {}
            if traits.writes:
                written = dict.fromkeys([roots[arg] for arg in written_nodes(node)])
            if traits.can_draw and draws_random_numbers(node):
                written[_IN_FLIGHT_RNG] = None
            read: dict[Any, None] = {}
            if not traits.view:
                read = dict.fromkeys([roots[arg] for arg in inputs])
            if node.target is WAIT and (sent := memory_on_wire(node)) is not None:
                read[roots[sent]] = None
            for root in read:
                if root in writer:
                    before[writer[root]] = None
            for root in written:
                if root in writer:
                    before[writer[root]] = None
                before.update(dict.fromkeys(readers.get(root, ())))
            if barrier is not None:
                before[barrier] = None
            if traits.opaque:
                before.update(dict.fromkeys(since_barrier))
                barrier, since_barrier = node, []
            elif node.op == "call_function":
                since_barrier.append(node)
            before.pop(node, None)
            self.direct[node] = list(before)
            for root in written:
                writer[root] = node
                readers[root] = []
            for root in read:
                if root not in written:
                    readers.setdefault(root, []).append(node)
