"""A compiled module in front of which Dynamo cuts the model into graphs: `compile(model, capture="dynamo")`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.distributed.algorithms.join import Join, JoinHook

from commfuse_fx.capture.graph_of_dynamo import Names
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.errors import NotAvailableError
from commfuse_fx.frontends.dynamo_graphs import DynamoGraphs, Graph
from commfuse_fx.frontends.module import CompiledModule
from commfuse_fx.inspect.explain_graphs import GraphsExplanation
from commfuse_fx.inspect.lowered import Lowered


class DynamoModule(CompiledModule):
    """A compiled module whose model Python may steer by values of tensors.

    Dynamo breaks the model into several graphs there. Each is compiled and reduces its gradients in buckets of its own.
    What no graph computes is reduced at the end of the backward.
    """

    def __init__(self, model: nn.Module, config: CompileConfig) -> None:
        super().__init__(model, config)
        self._start()

    def _start(self) -> None:
        self._graphs = DynamoGraphs(self._compiled, self._names_of)
        self._held: tuple[Any, Any] = (None, None)
        self._names: dict[int, str] = {}
        compiled: Any = torch.compile(self.module, backend=_backend)
        self._with_dynamo = [compiled]  # in a list, so that it is no part of this module

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        watch, late = self._compiled.planner.watch, self._graphs.late
        watch.look()
        if self._held[0] is not watch.params or self._held[1] is not watch.buffers:
            self._held = watch.params, watch.buffers
            self._names = {id(tensor): name for name, tensor in (*watch.params.items(), *watch.buffers.items())}
        late.watch(watch.params)
        late.syncs = self.require_backward_grad_sync
        if self._compiled.config.broadcast_buffers:
            late.send_buffers(watch.buffers)
        before, _running.graphs = _running.graphs, self._graphs
        try:
            return self._with_dynamo[0](*args, **kwargs)
        except Exception as error:
            if late.syncs:
                self._graphs.tell(error)
            raise
        finally:
            _running.graphs = before

    def _names_of(self, graph: Graph, values: Sequence[Any]) -> Names:
        return tuple(self._names.get(id(value)) for value in values)

    @property
    def graphs(self) -> list[Lowered]:
        """What has been compiled so far, in the order in which graphs were first run: to read, to diff, to dump.

        What is reduced at the end of a backward comes last.
        """
        found = self._graphs.explain()
        return [*found.compiled, *found.late]

    def explain(self) -> GraphsExplanation:
        """Which graphs are compiled, which run as they are and why, and what is reduced at the end of a backward."""
        return self._graphs.explain()

    def lower(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotAvailableError: which graphs there are follows from the values that a call computes."""
        raise NotAvailableError(
            'lower() is not available with capture="dynamo": which graphs there are follows from the values that a '
            "call computes. Call the module once, and read what was compiled in its attribute graphs, a list of Lowered"
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Raises NotAvailableError."""
        raise NotAvailableError(_NO_JOIN)

    def join(self, *args: Any, **kwargs: Any) -> Join:
        """Raises NotAvailableError."""
        raise NotAvailableError(_NO_JOIN)

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


class _Running(threading.local):
    """graphs: those of the module that runs in this thread."""

    graphs: DynamoGraphs | None = None


_running = _Running()


def _backend(graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """What Dynamo calls with each graph that it has made. It is the same for all modules: those of one class share
    graphs, which Dynamo counts (recompile_limit)."""
    made = Graph(graph, examples)
    return lambda *values: made.run(_running.graphs, values)


_NO_JOIN = (
    'join() is not available yet with capture="dynamo": a rank that has no more batches does not know which graphs the '
    'others run. Give all ranks as many batches (drop_last), or use capture="trace"'
)
