"""The graphs that Dynamo makes of a user's model: each is compiled as a model of its own when it is first run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from commfuse_fx.capture.graph_of_dynamo import GraphOfDynamo, Names, is_dynamic, sources_of, with_checkpoints
from commfuse_fx.frontends.compiled_call import CompiledCall
from commfuse_fx.frontends.graph_session import GraphCalls
from commfuse_fx.frontends.late_reduction import LateReduction
from commfuse_fx.inspect.lowered import Lowered
from commfuse_fx.support.logs import logger

_PLAN = logger("plan")


class DynamoGraphs:
    """All graphs of one model. They have one vote, and share what reduces gradients at the end of a backward.

    names_of: says of the arguments of a graph which parameters and buffers they are.
    """

    def __init__(self, owner: CompiledCall, names_of: Callable[[Graph, Sequence[Any]], Names]) -> None:
        self.owner = owner
        self.late = LateReduction(owner)
        self.names_of = names_of
        self._made: list[GraphCalls] = []

    def backend(self, graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """What Dynamo calls with each graph that it has made."""
        return Graph(self, graph, is_dynamic(examples), sources_of(graph)).run

    def compiled(self, model: GraphOfDynamo, args: Sequence[Any]) -> GraphCalls | None:
        """Compile a graph; None where that is not possible, as it has an op that cannot be traced."""
        calls = GraphCalls(model, self.owner)
        try:
            calls.compile(args)
        except Exception as error:
            _PLAN.warning(
                "a graph that Dynamo has made, with parameter %s and %d others, cannot be compiled and runs as it is; "
                "its gradients are reduced at the end of the backward [%s: %s]",
                *_first_of(model),
                type(error).__name__,
                str(error).partition("\n")[0],
            )
            return None
        self._made.append(calls)
        return calls

    def forget(self, calls: GraphCalls | None) -> None:
        """A graph will not run again as it was compiled."""
        self._made = [each for each in self._made if each is not calls]

    def lowered(self) -> list[Lowered]:
        """What has been compiled, in the order in which graphs were first run."""
        return [lowered for calls in (*self._made, *self.late.made()) for lowered in calls.lowered()]

    def retrace(self) -> None:
        """Forget what has been compiled."""
        for calls in self._made:
            calls.retrace()
        self.late.forget()


class Graph:
    """One graph of Dynamo, which may run with the parameters of several modules that have the same code.

    sources: for every argument the expression that it comes from.
    """

    def __init__(self, graphs: DynamoGraphs, graph: fx.GraphModule, is_dynamic: bool, sources: Sequence[str]) -> None:
        self.graph = with_checkpoints(graph)
        self.sources = sources
        self._graphs = graphs
        self._is_dynamic = is_dynamic
        self._made: dict[Names, tuple[list[torch.Tensor], GraphCalls | None]] = {}

    def run(self, *values: Any) -> Any:
        """Run the graph with these arguments."""
        graphs = self._graphs
        if not torch.is_grad_enabled():
            return self.graph(*values)
        names = graphs.names_of(self, values)
        held = [value for value, name in zip(values, names, strict=True) if name is not None]
        if not any(isinstance(value, nn.Parameter) and value.requires_grad for value in held):
            return self.graph(*values)
        others = [value for value, name in zip(values, names, strict=True) if name is None]
        before, calls = self._made.get(names, ([], None))
        if len(before) != len(held) or not all(map(operator.is_, before, held)):  # the first time, or replaced since
            graphs.forget(calls)
            calls = self._compiled(GraphOfDynamo(self.graph, values, names), others)
            self._made[names] = held, calls
        if calls is None:
            graphs.late.expect([name for name in names if name is not None])
            return self.graph(*values)
        syncs = graphs.late.syncs and not graphs.owner.config.find_unused_parameters
        return calls.run(others, syncs, partial(graphs.late.wrote, calls.buffers))

    def _compiled(self, model: GraphOfDynamo, others: Sequence[Any]) -> GraphCalls | None:
        if not self._is_dynamic:
            return self._graphs.compiled(model, others)
        _PLAN.info(
            "a graph that Dynamo has made for any size, with parameter %s and %d others, runs as it is; its gradients "
            "are reduced at the end of the backward, in buckets planned from the sizes of parameters",
            *_first_of(model),
        )
        return None


def _first_of(model: nn.Module) -> tuple[str, int]:
    """The first parameter, and how many others there are."""
    names = [name for name, _ in model.named_parameters()]
    return names[0], len(names) - 1
