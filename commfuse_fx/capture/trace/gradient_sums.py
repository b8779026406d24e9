"""Sums in which autograd collects the gradients of a value that was used several times.

Autograd adds the terms in the order in which they arrive. If the backward gets another order than in the trace, the
terms have to be added in another order too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from commfuse_fx.capture.trace.call_paths import CallPaths
from commfuse_fx.capture.trace.provenance import ORIGIN
from commfuse_fx.ir.core.meta import spec_of

_ADD = torch.ops.aten.add.Tensor
_NONE = -1  # no run of autograd ops


@dataclass
class GradientSum:
    """A sum of gradients: the node that yields it, and its terms."""

    total: fx.Node
    terms: list[fx.Node]


def added_by_autograd(
    calls: CallPaths, made: Mapping[int, Sequence[fx.Node]], event_of: Mapping[fx.Node, int]
) -> dict[int, fx.Node]:
    """Backward events that add a gradient to those of other autograd nodes: event -> node.

    Autograd adds the result of a node when the node has run, so these are the last ops of a run.
    """
    runs: dict[int, list[int]] = {}
    for number in sorted(made):
        if not calls.events[number].path:
            runs.setdefault(calls.events[number].run, []).append(number)
    found: dict[int, fx.Node] = {}
    for events in runs.values():
        for number in reversed(events):
            if len(made[number]) != 1 or not _is_sum(made[number][0]):
                break
            node = made[number][0]
            runs_above = [calls.events[event_of[value]].run for value in node.all_input_nodes if value in event_of]
            if len(runs_above) == 2 and all(run == calls.events[number].run for run in runs_above):
                break
            found[number] = node
    return found


def gather(sums: Sequence[fx.Node]) -> list[GradientSum]:
    """Merge chains of additions: until `spread`, the last node of each chain takes all terms of the sum at once."""
    known = dict.fromkeys(sums)
    inner = {
        node.args[0]: node
        for node in sums
        if isinstance(node.args[0], fx.Node) and node.args[0] in known and len(node.args[0].users) == 1
    }
    found: list[GradientSum] = []
    for node in sums:
        if node in inner:
            continue
        terms: list[fx.Node] = []
        current: fx.Node = node
        while True:
            first, second = current.args
            assert isinstance(first, fx.Node) and isinstance(second, fx.Node)
            terms.append(second)
            if first not in inner:
                terms.append(first)
                break
            current = first
        found.append(GradientSum(node, terms[::-1]))
    for each in found:
        each.total.args = (list(each.terms),)
    for node in reversed(list(inner)):
        if not node.users:
            node.graph.erase_node(node)
    return found


def spread(sums: Sequence[GradientSum], run_of: Mapping[fx.Node, int]) -> None:
    """Write each sum as a chain of additions again, in the order in which its terms now stand in the graph.

    run_of: the run of autograd ops that each node belongs to. An addition stands behind the run that yields its term,
        and becomes a part of it: a later term of the same sum may come from there as well.
    """
    runs = dict(run_of)
    place = {node: i for i, node in enumerate(sums[0].total.graph.nodes)} if sums else {}
    for each in sums:
        graph = each.total.graph
        first, *others = sorted(each.terms, key=place.__getitem__)
        value = first
        for term in others[:-1]:
            behind, run = term, runs.get(term, _NONE)
            while runs.get(behind.next) == run and behind.next is not each.total:
                behind = behind.next
            with graph.inserting_after(behind):
                made = graph.call_function(_ADD, (value, term))
            runs[made] = run
            made.meta.update(each.total.meta)
            _take_origin(made, term)
            value = made
        each.total.args = (value, others[-1])
        _take_origin(each.total, others[-1])


def _take_origin(node: fx.Node, term: fx.Node) -> None:
    """Give an addition the origin of the term that completes it, if this term belongs to the backward."""
    if ORIGIN in term.meta and term.meta[ORIGIN].phase == "backward":
        node.meta[ORIGIN] = term.meta[ORIGIN]


def _is_sum(node: fx.Node) -> bool:
    if node.target is not _ADD or node.kwargs or not all(isinstance(value, fx.Node) for value in node.args):
        return False
    specs = [spec_of(value.meta.get("val")) for value in node.all_input_nodes]
    return len(specs) == 2 and specs[0] == specs[1] == spec_of(node.meta.get("val"))
