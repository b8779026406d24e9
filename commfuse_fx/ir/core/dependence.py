"""What must come before what: data, mutation and effects.

Graphs mix pure ops with in-place ones (a gradient written into its bucket, an all_reduce in place, a
fused parameter update). Views share the memory of their base, so each node gets a *root*: the node
whose memory it reads or writes. Order between nodes follows from reads and writes of roots, as in any
compiler: a write waits for earlier reads and writes, a read for earlier writes.

Why: docs/decisions.md, "A merge that would close a cycle is split, not refused".
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.collectives import WAIT, memory_on_wire
from commfuse_fx.ir.core.random_draws import can_draw, draws_random_numbers

_IN_FLIGHT_RNG = object()


def is_view(node: fx.Node) -> bool:
    """True when the node only gives another shape or part to existing memory, and writes nothing."""
    return node.op == "call_function" and _traits_of(node.target).view


def is_opaque(node: fx.Node) -> bool:
    """A Python function whose effects nobody knows: nothing moves across it."""
    return node.op == "call_function" and _traits_of(node.target).opaque


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory this node writes."""
    if node.op != "call_function" or not (written := _traits_of(node.target).written):
        return []
    found: list[fx.Node] = []
    args, kwargs = node.args, node.kwargs
    for position, name in written:
        value = kwargs[name] if name in kwargs else args[position] if position < len(args) else None
        if isinstance(value, fx.Node):
            found.append(value)
        else:
            fx.node.map_arg(value, found.append)
    return found


@dataclass(frozen=True, slots=True)
class _Traits:
    """What an op says of all nodes that call it.

    aliases: it returns memory of its first argument, as views and in-place ops do.
    written: positions and names of the arguments that it writes.
    """

    target: Any
    view: bool
    aliases: bool
    written: tuple[tuple[int, str], ...]
    can_draw: bool
    opaque: bool


_NO_CALL = _Traits(None, view=False, aliases=False, written=(), can_draw=False, opaque=False)

_traits: dict[int, _Traits] = {}
"""By the identity of the op, which its traits keep alive: hashing an op runs Python code of torch's."""


def _traits_of(target: Any) -> _Traits:
    found = _traits.get(id(target))
    if found is None:
        found = _traits[id(target)] = _find_traits(target)
    return found


def _find_traits(target: Any) -> _Traits:
    written, aliases = _written_arguments(target), _alias_of_returns(target)
    return _Traits(
        target,
        view=target is operator.getitem or (aliases and not written),
        aliases=aliases,
        written=written,
        can_draw=can_draw(target),
        opaque=_is_opaque_op(target),
    )


def _alias_of_returns(target: Any) -> bool:
    if target is torch.ops.aten._unsafe_view.default:  # its schema hides it from autograd
        return True
    schema = getattr(target, "_schema", None)
    return schema is not None and any(ret.alias_info is not None for ret in schema.returns)


def _written_arguments(target: Any) -> tuple[tuple[int, str], ...]:
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


def _is_opaque_op(target: Any) -> bool:
    return (
        not hasattr(target, "_schema")
        and getattr(target, "__module__", "") not in ("_operator", "operator", "math")
        and not getattr(target, "commfuse_pure", False)
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
        if traits.aliases and (inputs := node.all_input_nodes):
            written = written_nodes(node) if traits.written else ()
            return self._root[written[0] if written else inputs[0]]
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
            if traits.written:
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
