"""The graphs that Dynamo makes of a user's model: each is compiled as a model of its own when it is first run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from commfuse_fx.capture.graph_of_dynamo import GraphOfDynamo, Names, is_dynamic, sources_of, with_checkpoints
from commfuse_fx.capture.views_of_outputs import UnknownViews, Views, views_of
from commfuse_fx.frontends.compiled_call import CompiledCall
from commfuse_fx.frontends.graph_session import GraphCalls
from commfuse_fx.frontends.late_reduction import LateReduction
from commfuse_fx.frontends.lowering import Lowering, refuse_collectives
from commfuse_fx.frontends.module_session import ModuleSession
from commfuse_fx.inspect.explain_graphs import AsItIs, GraphsExplanation
from commfuse_fx.support.logs import logger

_PLAN = logger("plan")

_Made = tuple[GraphOfDynamo, GraphCalls] | AsItIs


class DynamoGraphs:
    """All graphs of one model. They have one vote, and share what reduces gradients at the end of a backward.

    names_of: says of the arguments of a graph which parameters and buffers they are.
    lowering: takes note of graphs that are only to be compiled; None where they run.
    """

    def __init__(self, owner: CompiledCall, names_of: Callable[[Graph, Sequence[Any]], Names]) -> None:
        self.owner = owner
        self.late = LateReduction(owner)
        self.names_of = names_of
        self.lowering: Lowering | None = None
        # Dynamo's caches hold graphs, of which modules of one class share some.
        self._made: weakref.WeakKeyDictionary[Graph, dict[Names, _Made]] = weakref.WeakKeyDictionary()

    def calls_of(self, graph: Graph, names: Names, values: Sequence[Any]) -> GraphCalls | None:
        """What runs a graph with these arguments; None where it runs as it is."""
        made = self._made.setdefault(graph, {})
        if names not in made:
            made[names] = self._compiled(graph, names, values)
        found = made[names]
        if isinstance(found, AsItIs):
            if self.lowering is not None:
                self.lowering.as_they_are[found] = None
            return None
        model, calls = found
        model.hold(values)
        return calls

    def _compiled(self, graph: Graph, names: Names, values: Sequence[Any]) -> _Made:
        model = graph.model(values, names)
        params = tuple(name for name, _ in model.named_parameters())
        if graph.runs_as_it_is:
            _PLAN.info(
                "a graph that Dynamo has made, with parameter %s and %d others, runs as it is, as %s; its gradients "
                "are reduced at the end of the backward, in buckets planned from the sizes of parameters",
                params[0],
                len(params) - 1,
                graph.runs_as_it_is,
            )
            return AsItIs(params, graph.runs_as_it_is)
        calls = GraphCalls(model, self.owner, reduces=not self.owner.config.find_unused_parameters)
        try:
            others = [value for value, name in zip(values, names, strict=True) if name is None]
            if self.lowering is None:
                calls.compile(others)
            else:
                calls.read(others)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            _PLAN.warning(
                "a graph that Dynamo has made, with parameter %s and %d others, cannot be compiled and runs as it is; "
                "its gradients are reduced at the end of the backward [%s]",
                params[0],
                len(params) - 1,
                reason,
            )
            return AsItIs(params, f"it cannot be traced [{reason}]")
        return model, calls

    def _all_calls(self) -> list[GraphCalls]:
        made = (found for each in self._made.values() for found in each.values() if not isinstance(found, AsItIs))
        return sorted((calls for _, calls in made), key=lambda calls: calls.number)

    def tell(self, error: Exception) -> None:
        """Tell the other ranks, which will wait for this one in their backward, that its forward has failed."""
        assert isinstance(self.owner.session, ModuleSession)
        self.owner.session.tell(error)

    def explain(self) -> GraphsExplanation:
        """What has become of each graph so far."""
        compiled = [lowered for calls in self._all_calls() for lowered in calls.lowered()]
        as_they_are = [each for made in self._made.values() for each in made.values() if isinstance(each, AsItIs)]
        late = [lowered for calls in self.late.made() for lowered in calls.lowered()]
        return GraphsExplanation(tuple(compiled), tuple(sorted(as_they_are)), tuple(late))

    def retrace(self) -> None:
        """Forget what has been compiled."""
        for calls in self._all_calls():
            calls.retrace()
        self.late.forget()


class Graph:
    """One graph of Dynamo, which may run with the parameters of several modules that have the same code.

    sources: for every argument the expression that it comes from.
    runs_as_it_is: why it is not compiled; empty if it is.
    """

    def __init__(self, graph: fx.GraphModule, examples: Sequence[Any]) -> None:
        self.sources: Sequence[str] = sources_of(graph)  # while Dynamo still knows them
        self.runs_as_it_is = "it is for any size" if is_dynamic(examples) else ""
        self._graph = with_checkpoints(graph)
        self._views: Views | None = None
        self._outputs = sum(len(tree_leaves(node.args)) for node in graph.graph.nodes if node.op == "output")
        if not self.runs_as_it_is:
            try:
                self._views = views_of(graph)
            except UnknownViews:
                self.runs_as_it_is = "its outputs share memory, which autograd has to know"

    def model(self, values: Sequence[Any], names: Names) -> GraphOfDynamo:
        """The graph as a model that holds those of these arguments that have names."""
        return GraphOfDynamo(self._graph, values, names, None if self._views is None else self._views.kept)

    def run(self, graphs: DynamoGraphs | None, values: Sequence[Any]) -> Any:
        """Run the graph with these arguments. graphs: those of the model that runs now, if one does."""
        if graphs is None or not torch.is_grad_enabled():
            return self._run_as_it_is(values)
        names = graphs.names_of(self, values)
        held = (value for value, name in zip(values, names, strict=True) if name is not None)
        if not any(isinstance(value, nn.Parameter) and value.requires_grad for value in held):
            return self._run_as_it_is(values)
        if graphs.lowering is not None and graphs.owner.mesh.world > 1:
            refuse_collectives(self._graph)
        calls = graphs.calls_of(self, names, values)
        if graphs.lowering is not None:
            return self._lower(graphs.lowering, calls, values, names)
        if calls is None:
            graphs.late.expect([name for name in names if name is not None])
            return self._run_as_it_is(values)
        others = [value for value, name in zip(values, names, strict=True) if name is None]
        syncs = graphs.late.syncs and not graphs.owner.config.find_unused_parameters
        outputs = calls.run(others, syncs, partial(graphs.late.wrote, calls.buffers))
        return outputs if self._views is None else self._views.outputs(values, outputs)

    def _lower(self, lowering: Lowering, calls: GraphCalls | None, values: Sequence[Any], names: Names) -> Any:
        """Compile the graph, and compute its outputs as it is, so that the call goes on. Autograd does not come to the
        parameters of a graph that reduces their gradients."""
        if calls is None:
            return self._run_as_it_is(values)
        lowering.add(calls, [value for value, name in zip(values, names, strict=True) if name is None])
        given = list(values)
        for place, (value, name) in enumerate(zip(values, names, strict=True)):
            if name is not None and isinstance(value, nn.Parameter):
                given[place] = value.detach().requires_grad_(value.requires_grad)
        return self._run_as_it_is(given)

    def _run_as_it_is(self, values: Sequence[Any]) -> Any:
        return self._graph(*values)[: self._outputs]
