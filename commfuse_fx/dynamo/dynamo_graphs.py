"""The graphs that Dynamo makes of a user's model: each is compiled as a model of its own when it is first run.

Why: docs/decisions.md, "With Dynamo in front, several ranks plan by rules".
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from commfuse_fx.calls.compiled_call import CompiledCall
from commfuse_fx.calls.graph_session import GraphCalls
from commfuse_fx.calls.late.late_reduction import LateReduction
from commfuse_fx.calls.module_session import ModuleSession
from commfuse_fx.capture.dynamo.graph_of_dynamo import GraphOfDynamo, Names
from commfuse_fx.capture.dynamo.shared_graph import SharedGraph, is_trained, others, with_own_leaves
from commfuse_fx.capture.outputs.gradients_as_model import GradientsAsModel
from commfuse_fx.dynamo.autograd_session import AutogradSession
from commfuse_fx.dynamo.lowering import Lowering, refuse_collectives
from commfuse_fx.inspect.explain_graphs import AsItIs, GraphsExplanation
from commfuse_fx.planning.plan_cache import MAX_GRAPHS
from commfuse_fx.support.logs import logger

_PLAN = logger("plan")


@dataclass(frozen=True)
class _Compiled:
    """A graph that sends its gradients itself. model: holds its arguments; None where autograd runs it."""

    calls: GraphCalls
    model: GraphOfDynamo | None


_Made = dict[tuple[str, ...], _Compiled | AsItIs]
"""What has been made of one graph, by the parameters that are trained: in some versions of torch Dynamo does not make
another graph when one is frozen."""


class DynamoGraphs:
    """All graphs of one model. They have one vote, and share what reduces gradients at the end of a backward.

    names_of: says of the arguments of a graph which parameters and buffers they are.
    lowering: takes note of graphs that are only to be compiled; None where they run.
    """

    def __init__(self, owner: CompiledCall, names_of: Callable[[SharedGraph, Sequence[Any]], Names]) -> None:
        self.owner = owner
        self.late = LateReduction(owner)
        self.names_of = names_of
        self.lowering: Lowering | None = None
        # Dynamo's caches hold graphs, of which modules of one class share some.
        self._made: weakref.WeakKeyDictionary[SharedGraph, dict[Names, _Made]] = weakref.WeakKeyDictionary()
        if owner.mesh.world > 1 and owner.config.comm_fusion.is_optimal:
            _PLAN.warning(
                'with Dynamo in front, mode "optimal" takes buckets of 25 MiB on several ranks, which may come to a '
                'graph at other times and cannot agree on prices then: use mode "size" for this or another size'
            )

    def run(self, graph: SharedGraph, values: Sequence[Any]) -> Any:
        """Run a graph with these arguments, or compile it only."""
        names = self.names_of(graph, values)
        trained = tuple(str(name) for name, value in zip(names, values, strict=True) if is_trained(value, name))
        if not trained:
            return graph.run_as_it_is(values)
        if self.lowering is not None and self.owner.mesh.world > 1:
            refuse_collectives(graph.graph)
        made = self._made.setdefault(graph, {}).setdefault(names, {})
        if trained not in made:
            if len(made) >= MAX_GRAPHS:
                made.pop(next(iter(made)))
            made[trained] = self._compiled(graph, names, values, trained)
        found = made[trained]
        if isinstance(found, AsItIs):
            if self.lowering is not None:
                self.lowering.as_they_are[found] = None
            self.late.expect([name for name in names if name is not None])
            return graph.run_as_it_is(values)
        given = values
        if found.model is not None:
            found.model.hold(values)
            given = others(values, names)
        if self.lowering is not None:
            self.lowering.add(found.calls, given)
            return graph.run_as_it_is(with_own_leaves(values, names))  # so that the call goes on
        syncs = self.late.syncs and not self.owner.config.find_unused_parameters
        return graph.outputs(values, found.calls.run(given, syncs, partial(self.late.wrote, found.calls.buffers)))

    def _compiled(
        self, graph: SharedGraph, names: Names, values: Sequence[Any], trained: tuple[str, ...]
    ) -> _Compiled | AsItIs:
        if graph.runs_as_it_is:
            _PLAN.info(
                "a graph that Dynamo has made, with %s, runs as it is, as %s; its gradients are reduced at the end of "
                "the backward, in buckets planned from the sizes of parameters",
                _listed(trained),
                graph.runs_as_it_is,
            )
            return AsItIs(trained, graph.runs_as_it_is)
        why, sent = "the graph is for any size" if graph.is_for_any_size else "", []
        if not why or self._shares_order:
            model = graph.model(values, names)
            calls = GraphCalls(model, self.owner, reduces=self._reduces)
            try:
                sent = self._compile(calls, others(values, names))
            except Exception as error:
                why = why or f"the graph cannot be traced [{_in_short(error)}]"
            else:
                if not why:
                    return _Compiled(calls, model)
        _PLAN.log(
            logging.INFO if graph.is_for_any_size else logging.WARNING,
            "a graph that Dynamo has made, with %s, is run by autograd, op by op, as %s; its gradients are sent in "
            "buckets planned from the sizes of parameters",
            _listed(trained),
            why,
        )
        order = [name for name in dict.fromkeys((*sent, *graph.gradient_order(names))) if name in trained]
        held = {name: value for name, value in zip(names, values, strict=True) if name is not None}
        run = graph.ops()
        by_autograd = GraphCalls(
            GradientsAsModel(held, order, why),
            self.owner,
            self._reduces,
            lambda planner, owner: AutogradSession(planner, owner, run, names, order),
        )
        self._compile(by_autograd, values)
        return _Compiled(by_autograd, None)

    @property
    def _reduces(self) -> bool:
        """Whether graphs reduce their gradients: with find_unused_parameters=True that is done at the end."""
        return not self.owner.config.find_unused_parameters

    @property
    def _shares_order(self) -> bool:
        """Whether a graph for any size has to send what other ranks send that run the same code as a graph for their
        size."""
        return self.owner.mesh.world > 1 and self._reduces

    def _compile(self, calls: GraphCalls, args: Sequence[Any]) -> list[str]:
        """Compile a graph for these arguments, to be read or to be run. Returns what it sends, by name."""
        if self.lowering is None:
            calls.compile(args)
            lowered = calls.lowered()[-1]
        else:
            lowered = calls.read(args)
        return [name for each in lowered.collectives for name in each.members]

    def _all(self) -> list[_Compiled | AsItIs]:
        return [found for graph in self._made.values() for made in graph.values() for found in made.values()]

    def _all_calls(self) -> list[GraphCalls]:
        calls = (found.calls for found in self._all() if isinstance(found, _Compiled))
        return sorted(calls, key=lambda calls: calls.number)

    def tell(self, error: Exception) -> None:
        """Tell the other ranks, which will wait for this one in their backward, that its forward has failed."""
        assert isinstance(self.owner.session, ModuleSession)
        self.owner.session.tell(error)

    def explain(self) -> GraphsExplanation:
        """What has become of each graph so far."""
        compiled = [lowered for calls in self._all_calls() for lowered in calls.lowered()]
        as_they_are = [each for each in self._all() if isinstance(each, AsItIs)]
        late = [lowered for calls in self.late.graphs.made() for lowered in calls.lowered()]
        return GraphsExplanation(tuple(compiled), tuple(sorted(as_they_are)), tuple(late))

    def forget(self, params: Sequence[str]) -> None:
        """Drop what has been compiled of graphs with parameters of these names, which belong to a model no longer."""
        gone = set(params)
        for made in self._made.values():
            for names in [names for names in made if not gone.isdisjoint(names)]:
                del made[names]
        self.late.unwatch(params)

    def retrace(self) -> None:
        """Forget what has been compiled."""
        for calls in self._all_calls():
            calls.retrace()
        self.late.graphs.forget()


def run_graph(graphs: DynamoGraphs | None, graph: SharedGraph, values: Sequence[Any]) -> Any:
    """Run a graph with these arguments. graphs: those of the model that runs now, if one does."""
    if graphs is None or not torch.is_grad_enabled():
        return graph.run_as_it_is(values)
    return graphs.run(graph, values)


def _listed(params: Sequence[str]) -> str:
    return f"parameter {params[0]}" + (f" and {len(params) - 1} more" if len(params) > 1 else "")


def _in_short(error: Exception) -> str:
    """The same on all ranks: without addresses."""
    text = re.sub(" object at 0x[0-9a-f]+", "", str(error).partition("\n")[0])
    return f"{type(error).__name__}: {text if len(text) <= _LONGEST else text[:_LONGEST] + '...'}"


_LONGEST = 200
