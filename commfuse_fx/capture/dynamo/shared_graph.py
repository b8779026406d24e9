"""A graph of Dynamo, with what running it takes: Dynamo's caches hold it for all modules that have the same code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn
from torch.utils._pytree import tree_leaves

from commfuse_fx.capture.dynamo.changed_arguments import changed_arguments
from commfuse_fx.capture.dynamo.gradient_order import gradient_order
from commfuse_fx.capture.dynamo.graph_of_dynamo import (
    GraphOfDynamo,
    Names,
    is_dynamic,
    sources_of,
    with_checkpoints,
)
from commfuse_fx.capture.dynamo.views_of_outputs import UnknownViews, Views, views_of


class SharedGraph:
    """One graph of Dynamo, which may run with the parameters of several modules that have the same code.

    sources: for every argument the expression that it comes from.
    is_for_any_size: whether sizes of its arguments are not known.
    runs_as_it_is: why it can be run in no other way; empty if it can.
    """

    def __init__(self, graph: fx.GraphModule, examples: Sequence[Any]) -> None:
        self.sources: Sequence[str] = sources_of(graph)  # while Dynamo still knows them
        self.is_for_any_size = is_dynamic(examples)
        self.runs_as_it_is = ""
        self.graph = with_checkpoints(graph)
        self._views: Views | None = None
        self._outputs = sum(len(tree_leaves(node.args)) for node in graph.graph.nodes if node.op == "output")
        changed = changed_arguments(graph)
        if any(node.meta["example_value"].requires_grad for node in changed):
            self.runs_as_it_is = "it changes arguments that have a gradient, which autograd has to know"
            return
        try:
            self._views = views_of(graph, changed)
        except UnknownViews:
            self.runs_as_it_is = "its outputs share memory, which autograd has to know"

    def model(self, values: Sequence[Any], names: Names) -> GraphOfDynamo:
        """The graph as a model that holds those of these arguments that have names."""
        return GraphOfDynamo(self.graph, values, names, None if self._views is None else self._views.kept)

    def ops(self) -> Callable[..., Sequence[Any]]:
        """A function that runs them, and returns what the model does. It does not hold this object."""
        graph = self.graph
        kept = range(self._outputs) if self._views is None else self._views.kept

        def run(*values: Any) -> list[Any]:
            outputs = graph(*values)
            return [outputs[place] for place in kept]

        return run

    def gradient_order(self, names: Names) -> list[str]:
        """The parameters and buffers among its arguments, in the order in which gradients become ready."""
        return gradient_order(self.graph, names)

    def outputs(self, values: Sequence[Any], kept: Any) -> Any:
        """What the graph returns for these arguments, given what its model or its ops have returned."""
        return kept if self._views is None else self._views.outputs(values, kept)

    def run_as_it_is(self, values: Sequence[Any]) -> Any:
        """Run the graph with these arguments."""
        return self.graph(*values)[: self._outputs]


def is_trained(value: Any, name: str | None) -> bool:
    """Whether an argument of this name is a parameter that requires a gradient."""
    return name is not None and isinstance(value, nn.Parameter) and value.requires_grad


def others(values: Sequence[Any], names: Names) -> list[Any]:
    """The arguments that have no name."""
    return [value for value, name in zip(values, names, strict=True) if name is None]


def with_own_leaves(values: Sequence[Any], names: Names) -> list[Any]:
    """The same arguments, with leaves that stand for the parameters: autograd does not come to these."""
    return [
        value.detach().requires_grad_(value.requires_grad)
        if name is not None and isinstance(value, nn.Parameter)
        else value
        for value, name in zip(values, names, strict=True)
    ]
