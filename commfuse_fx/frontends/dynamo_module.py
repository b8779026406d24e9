"""A compiled module in front of which Dynamo cuts the model into graphs: `compile(model, capture="dynamo")`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx, nn

from commfuse_fx.capture.dynamo.graph_of_dynamo import Names
from commfuse_fx.capture.dynamo.shared_graph import SharedGraph
from commfuse_fx.capture.guards.signature import Watch
from commfuse_fx.capture.guards.tree import flatten_output
from commfuse_fx.config.fusion_marks import is_of_each_rank
from commfuse_fx.dynamo.call_undone import call_undone
from commfuse_fx.dynamo.dynamo_graphs import DynamoGraphs, run_graph
from commfuse_fx.dynamo.lowering import Lowering, reached_by_autograd
from commfuse_fx.errors import CaptureError, ConfigValueError
from commfuse_fx.frontends.module import CompiledModule
from commfuse_fx.inspect.explain_graphs import GraphsExplanation
from commfuse_fx.inspect.lowered import Lowered
from commfuse_fx.inspect.lowered_graphs import LoweredGraphs
from commfuse_fx.ops import nothing_sent
from commfuse_fx.support.checks import show
from commfuse_fx.support.tracebacks import user_frames_only


class DynamoModule(CompiledModule):
    """A compiled module whose model Python may steer by values of tensors.

    Dynamo breaks the model into several graphs there. Each is compiled and reduces its gradients in buckets of its own.
    What no graph computes is reduced at the end of the backward.
    """

    _graphs: DynamoGraphs
    _held: tuple[Any, Any]
    _names: dict[int, str]
    _with_dynamo: list[Any]

    def _meet_ranks(self) -> None:
        super()._meet_ranks()
        self._start()

    def _start(self) -> None:
        self._graphs = DynamoGraphs(self._compiled, self._names_of)
        self._held = None, None
        self._names = {}
        compiled: Any = torch.compile(self.module, backend=_backend)
        self._with_dynamo = [compiled]  # in a list, so that it is no part of this module

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        late, syncs = self._graphs.late, self.require_backward_grad_sync
        owes = self._begin_iteration(syncs)
        self._look()
        late.begin(syncs)
        try:
            outputs = self._run_graphs(args, kwargs)
        except Exception as error:
            if syncs or owes:
                self._graphs.tell(error)
            raise
        if owes and not syncs:
            self._end_iteration()
        elif syncs and self._session.uneven is not None:
            late.follow(_tensors_in(outputs))
        return outputs

    @contextmanager
    def _all_reduce(self) -> Iterator[None]:
        late = self._graphs.late
        before, late.syncs = late.syncs, True
        late.expect(list(self._look().params))
        try:
            with super()._all_reduce():
                yield
        finally:
            late.syncs = before

    def _look(self) -> Watch:
        """Look at the parameters and buffers that the model has now."""
        watch = self._compiled.planner.watch
        watch.look()
        if self._held[0] is not watch.params or self._held[1] is not watch.buffers:
            self._held = watch.params, watch.buffers
            self._names = {id(tensor): name for name, tensor in (*watch.params.items(), *watch.buffers.items())}
        self._graphs.late.watch(watch.params)
        if self._compiled.config.broadcast_buffers:
            self._graphs.late.send_buffers(watch.buffers)
        return watch

    def _run_graphs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        before, _running.graphs = _running.graphs, self._graphs
        try:
            return self._with_dynamo[0](*args, **kwargs)
        except ValueError as error:
            _explain_sync_batch_norm(self.module, error)
            raise
        finally:
            _running.graphs = before

    def _names_of(self, graph: SharedGraph, values: Sequence[Any]) -> Names:
        return tuple(self._names.get(id(value)) for value in values)

    @property
    def graphs(self) -> list[Lowered]:
        """What has been compiled so far, in the order in which graphs were first run: to read, to diff, to dump.

        What is reduced at the end of a backward comes last.
        """
        found = self._graphs.explain()
        return [*found.compiled, *found.late]

    def explain(self, cluster: Any = None, timings: bool = False) -> GraphsExplanation:
        """Which graphs are compiled, which run as they are and why, and what is reduced at the end of a backward.

        Raises ConfigValueError for a cluster or timings, which are asked of one graph: `graphs[0].explain(...)`.
        """
        if cluster is not None or timings:
            raise ConfigValueError(
                f"explain(cluster={show(cluster)}, timings={timings}) of a model that Dynamo cuts into graphs: ask one "
                "of them, as in graphs[0].explain(timings=True)"
            )
        return self._graphs.explain()

    @user_frames_only
    def lower(self, *args: Any, **kwargs: Any) -> Lowered | LoweredGraphs:  # type: ignore[override]
        """Compile the graphs of a call, in a virtual world, too. Returns a Lowered if there is one, else LoweredGraphs.

        Which graphs there are follows from values, so the model's own code runs once, op by op, with these arguments.
        Afterwards parameters, buffers, `.grad`, modes and the random generators of torch, NumPy and Python are what
        they were; a copy of parameters and buffers is held meanwhile. Other attributes that the code sets stay set.
        Nothing is compiled to be run, and nothing is sent, unless the code calls functions of torch.distributed.

        Gradients that are reduced at the end of the backward are found from the output, as far as autograd shows them.

        Raises NotAvailableError on several ranks for a model with collectives in it, and what the model raises.
        """
        self._follow_world()
        graphs, lowering = self._graphs, Lowering()
        quietly = nothing_sent() if self._compiled.mesh.world > 1 else nullcontext()
        graphs.lowering = lowering
        try:
            with quietly, torch.inference_mode(False), torch.enable_grad(), call_undone(self.module):
                watch = self._look()
                outputs = _tensors_in(self._run_graphs(args, kwargs))
                reached = reached_by_autograd([output for output in outputs if output.requires_grad])
        finally:
            graphs.lowering = None
        names = [name for name, param in watch.params.items() if id(param) in reached]
        names += [name for each in lowering.as_they_are for name in each.params]
        config = self._compiled.config
        held = watch.buffers.items() if config.broadcast_buffers else ()
        buffers = {name: each for name, each in held if not is_of_each_rank(each, config.parallel_mode)}
        late = graphs.late.graphs.lower(names, lowering.sent, watch.params, buffers)
        if len(lowering.compiled) == 1 and not late and not lowering.as_they_are:
            return lowering.compiled[0]
        return LoweredGraphs(tuple(lowering.compiled), tuple(late), tuple(lowering.as_they_are))

    def retrace(self) -> None:
        """Forget what has been compiled, so that the next call compiles its graphs again."""
        self._graphs.retrace()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        for name in ("_graphs", "_with_dynamo", "_held", "_names"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()


def _explain_sync_batch_norm(model: nn.Module, error: ValueError) -> None:
    """Raises CaptureError where torch's own SyncBatchNorm, which runs here, has refused a CPU."""
    names = [name for name, each in model.named_modules() if isinstance(each, nn.SyncBatchNorm) and each.training]
    if names and "SyncBatchNorm" in str(error):
        raise CaptureError(
            f'{names[0] or "the top-level module"} is a SyncBatchNorm, and with capture="dynamo" torch\'s own runs, '
            "which needs a GPU: leave capture out, which takes SyncBatchNorm on CPUs, too, or use BatchNorm"
        ) from error


def _tensors_in(outputs: Any) -> list[torch.Tensor]:
    """The tensors that a model has returned; none if an object among them holds itself."""
    try:
        return [output for _, output in flatten_output(outputs, "output")[0]]
    except CaptureError:
        return []


class _Running(threading.local):
    """graphs: those of the module that runs in this thread."""

    graphs: DynamoGraphs | None = None


_running = _Running()


def _backend(graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """What Dynamo calls with each graph that it has made. It is the same for all modules: those of one class share
    graphs, which Dynamo counts (recompile_limit)."""
    made = SharedGraph(graph, examples)
    return lambda *values: run_graph(_running.graphs, made, values)
