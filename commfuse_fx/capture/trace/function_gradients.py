"""Note from which outputs the gradients of each `torch.autograd.Function` in a traced backward follow.

A loss may use only some of a module's outputs. Autograd then does not run a function that gets no gradient. If it gets
some, it has zeros for the others, or None if `ctx.set_materialize_grads(False)` was called. Nothing is known of what
the function makes of them. Dynamo's graphs do not tell of that call: their functions get zeros, as under any backend.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from commfuse_fx.capture.torch_parts.this_thread import patched_here
from commfuse_fx.capture.trace.call_paths import CallPaths
from commfuse_fx.capture.trace.provenance import ORIGIN, origin_of, traced_graph

_ALIAS = torch.ops.aten.alias.default
_MARK = "_commfuse_gets_none"
_CONTEXT = torch.autograd.function.FunctionCtx
_set_materialize_grads = _CONTEXT.set_materialize_grads


@dataclass(frozen=True)
class FunctionCall:
    """One call of a function in a traced backward.

    source: its line. gets_none: whether it gets None for a missing gradient, in place of zeros.
    outputs: the numbers of the outputs that its gradients follow from.
    gradients: if they follow from different ones, for each the name of its node in the captured program, and its
        outputs. The name is empty if the function does not use the gradient.
    nodes: the names of what it computes.
    """

    source: str
    gets_none: bool
    outputs: frozenset[int]
    gradients: tuple[tuple[str, frozenset[int]], ...]
    nodes: tuple[str, ...]

    def runs_without(self, absent: Collection[int]) -> bool:
        """Whether autograd runs it if these outputs have no gradient."""
        return not self.outputs.issubset(absent)

    def missing(self, absent: Collection[int]) -> list[str]:
        """The names of the gradients that it then misses, if it is run."""
        if not self.runs_without(absent):
            return []
        return [name for name, outputs in self.gradients if outputs.issubset(absent)]


@dataclass
class _Found:
    sequence: int
    gets_none: bool
    outputs: frozenset[int]
    gradients: list[tuple[int, frozenset[int]]]


class FunctionGradients:
    """The functions of one backward, which `watched` finds. source_of: gives the line for a number of autograd."""

    def __init__(self, source_of: Callable[[int], str]) -> None:
        self._source_of = source_of
        self._found: list[_Found] = []
        self._count = 0

    @contextmanager
    def watched(self, results: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside the `with` block a backward from these results gives a node of its own to each gradient that a
        function may miss."""
        handles = []
        for node, slots in _functions(results).items():
            found = _Found(node._sequence_nr(), getattr(node, _MARK, False), frozenset().union(*slots), [])
            self._found.append(found)
            if len({outputs for outputs in slots if outputs}) > 1:
                first = self._count
                self._count += len(slots)
                found.gradients = [(first + place, outputs) for place, outputs in enumerate(slots) if outputs]
                handles.append(node.register_prehook(lambda grads, first=first: _own_nodes(grads, first)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def calls(self, graph: fx.Graph, calls: CallPaths, name_of: Callable[[fx.Node], str]) -> tuple[FunctionCall, ...]:
        """What has been found, in terms of the nodes of a graph that was made of the trace."""
        if not self._found:
            return ()
        names = {origin_of(node).gradient: name_of(node) for node in graph.nodes if is_gradient(node)}
        computed: dict[int | None, list[str]] = {}
        for node in graph.nodes:
            event = origin_of(node).event
            if node.op == "call_function" and event >= 0 and not calls.events[event].path:
                computed.setdefault(calls.events[event].sequence, []).append(name_of(node))
        return tuple(
            FunctionCall(
                self._source_of(each.sequence),
                each.gets_none,
                each.outputs,
                tuple((names.get(number, ""), outputs) for number, outputs in each.gradients),
                tuple(computed.get(each.sequence, ())),
            )
            for each in self._found
        )


def is_gradient(node: fx.Node) -> bool:
    """Whether a node stands for a gradient that a function may miss."""
    return node.target is _ALIAS and origin_of(node).gradient >= 0


def functions_noted() -> AbstractContextManager[None]:
    """Inside the `with` block it is noted which functions get None for missing gradients: torch does not tell."""
    return patched_here(_CONTEXT, "set_materialize_grads", _note)


def _note(context: Any, value: bool) -> None:
    setattr(context, _MARK, not value)
    _set_materialize_grads(context, value)


def _own_nodes(grads: Sequence[torch.Tensor | None], first: int) -> tuple[torch.Tensor | None, ...]:
    return tuple(grad if grad is None else _own_node(grad, first + place) for place, grad in enumerate(grads))


def _own_node(grad: torch.Tensor, number: int) -> torch.Tensor:
    found: torch.Tensor = _ALIAS(grad)
    node = traced_graph()._root.prev
    assert node.target is _ALIAS, "the trace records every op"
    node.meta[ORIGIN] = replace(origin_of(node), gradient=number)
    return found


def _functions(results: Sequence[torch.Tensor]) -> dict[Any, list[frozenset[int]]]:
    """The functions that a backward from these results reaches, and the numbers of the results that each of their
    gradients follows from."""
    roots = [(result.grad_fn, result.output_nr) for result in results]
    order = _from_results_on([node for node, _ in roots])
    if not any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in order):
        return {}
    masks: dict[Any, list[int]] = {node: [0] * max(1, len(node._input_metadata)) for node in order}
    for number, (node, place) in enumerate(roots):
        if node is not None:
            masks[node][place] |= 1 << number
    for node in order:
        for number, (parent, place) in enumerate(node.next_functions):
            if parent is not None:
                masks[parent][place] |= _mask(node, masks[node], number)
    return {
        node: [frozenset(number for number in range(len(results)) if mask >> number & 1) for mask in masks[node]]
        for node in order
        if isinstance(node, torch.autograd.function.BackwardCFunction)
    }


def _mask(node: Any, slots: list[int], number: int) -> int:
    """Of the outputs that a gradient follows from which a node of autograd hands on over this edge."""
    count = len(slots)
    if node.name().startswith("Foreach") and number < len(node.next_functions) // count * count:
        return slots[number % count]  # such ops work on each tensor of their lists by itself
    found = 0
    for mask in slots:
        found |= mask
    return found


def _from_results_on(roots: Sequence[Any]) -> list[Any]:
    """The nodes of autograd's graph, each before those that it hands gradients to."""
    done: dict[Any, None] = {}
    seen: dict[Any, None] = {}
    waiting = [(node, False) for node in roots if node is not None]
    while waiting:
        node, is_left = waiting.pop()
        if is_left:
            done[node] = None
        elif node not in seen:
            seen[node] = None
            waiting.append((node, True))
            waiting.extend((parent, False) for parent, _ in node.next_functions if parent is not None)
    return list(reversed(done))
