"""Inputs of a trace that its backward writes, such as the statistics of a batch norm that activation checkpointing runs
again there: the forward leaves one value in them, and the backward another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from commfuse_fx.capture.torch_parts.batch_norm import statistics_of
from commfuse_fx.capture.trace.provenance import origin_of
from commfuse_fx.ir.core.dependence import Roots, written_nodes

aten = torch.ops.aten


def return_early_values(graph: fx.Graph) -> list[int]:
    """Let a trace return, after all else, the values that these inputs have where its backward begins.

    graph: as it was recorded, before it is made functional. Returns the numbers of the inputs.
    """
    late = [node for node in graph.nodes if node.op == "call_function" and origin_of(node).phase == "backward"]
    writes = {node: (*written_nodes(node), *statistics_of(node)) for node in late}
    if not any(writes.values()):
        return []
    roots = Roots(graph)
    written = dict.fromkeys(roots[value] for values in writes.values() for value in values)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    found = [number for number, node in enumerate(inputs) if node in written]
    with graph.inserting_before(late[0]):
        early = [graph.call_function(aten.clone.default, (inputs[number],)) for number in found]
    for node, number in zip(early, found, strict=True):
        node.meta["val"] = inputs[number].meta["val"]
    output = graph.output_node()
    output.args = ([*_returned(output), *early],)
    return found


def take_early_values(graph: fx.Graph, numbers: Sequence[int]) -> dict[fx.Node, fx.Node]:
    """For each of these inputs the node of its value where the backward begins: the input itself if the forward
    does not write it. The functional trace returns them no more."""
    if not numbers:
        return {}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    output = graph.output_node()
    returned = _returned(output)
    early = returned[-len(numbers) :]
    output.args = (returned[: -len(numbers)],)
    found: dict[fx.Node, fx.Node] = {}
    for number, copied in zip(numbers, early, strict=True):
        (found[inputs[number]],) = copied.all_input_nodes
        graph.erase_node(copied)
    return found


def _returned(output: fx.Node) -> list[fx.Node]:
    values: Any = output.args[0]
    return list(values)
