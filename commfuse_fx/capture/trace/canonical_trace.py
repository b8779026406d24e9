"""Make a trace independent of the order in which Python built it: order its nodes, inputs and constants."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx, nn

from commfuse_fx.capture.trace.canonical_order import order_canonically
from commfuse_fx.capture.trace.node_keys import NodeKeys, natural_text
from commfuse_fx.capture.trace.provenance import origin_of
from commfuse_fx.capture.trace.trace import Traced
from commfuse_fx.ir.core.order import reorder
from commfuse_fx.ir.core.program import Source


def canonicalize(traced: Traced, sources: Sequence[Source], model: nn.Module) -> list[Source]:
    """Put a trace in canonical order; returns the sources of its placeholders in their new order.

    sources: the sources of the placeholders in their present order.

    If the program's loops ran in canonical order, all values stay bitwise the same. Otherwise gradients of values with
    more than two uses are summed in another order.
    """
    graph = traced.graph
    named = dict(zip(traced.placeholders, sources, strict=True))
    events = {node: origin.event for node in graph.nodes if (origin := origin_of(node)).event >= 0}
    modules = {node: origin_of(node).module for node in events if origin_of(node).phase == "forward"}
    keys = NodeKeys({node: source.name for node, source in named.items()}, modules, traced.constants)
    _order_buffers(traced, named, model)
    order_canonically(graph, traced.calls, events, keys)
    place = {node: i for i, node in enumerate(graph.nodes)}
    traced.mutations.sort(key=lambda pair: place[pair[0]])
    traced.constants = {
        str(node.target): traced.constants[str(node.target)] for node in graph.nodes if node.op == "get_attr"
    }
    return [named[node] for node in traced.placeholders]


def _order_buffers(traced: Traced, named: dict[fx.Node, Source], model: nn.Module) -> None:
    """Sort the buffers of each module by name, since a module may have registered them in the order of a set.

    Buffers of torch's own modules keep their order.
    """
    buffers = [node for node in traced.placeholders if named[node].kind == "buffer"]
    owners = dict.fromkeys(named[node].name.rpartition(".")[0] for node in buffers)
    rank = {owner: i for i, owner in enumerate(owners)}

    def key(node: fx.Node) -> tuple[object, ...]:
        owner, _, name = named[node].name.rpartition(".")
        torchs = type(model.get_submodule(owner)).__module__.startswith("torch.")
        return rank[owner], () if torchs else natural_text(name)

    ordered = iter(sorted(buffers, key=key))
    traced.placeholders = [next(ordered) if named[n].kind == "buffer" else n for n in traced.placeholders]
    others = [node for node in traced.graph.nodes if node.op != "placeholder"]
    reorder(traced.graph, [*traced.placeholders, *others])
