"""Runs a graph by autograd, op by op, and sends gradients in planned buckets as autograd computes them.

So a graph serves for any size: nothing that is planned depends on sizes other than those of parameters.

Why: docs/decisions.md, "Autograd runs a graph for any size, and a compiled backward sends its gradients".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from commfuse_fx.calls.graph_session import GraphSession
from commfuse_fx.calls.module_session import ModuleSession
from commfuse_fx.capture.dynamo.graph_of_dynamo import Names
from commfuse_fx.capture.guards.tree import flatten_output
from commfuse_fx.capture.joint import Outputs
from commfuse_fx.capture.outputs.gradients_as_model import GradientsAsModel
from commfuse_fx.errors import NotAvailableError
from commfuse_fx.gradients.kept_forward import Forward, Versions, guarded, values_of
from commfuse_fx.planning.planner import Planner
from commfuse_fx.planning.request import Call
from commfuse_fx.runtime.execute.halves_executor import Arrivals, NamedGradients
from commfuse_fx.runtime.ranks.callers import lock_of


@dataclass(frozen=True)
class Recorded:
    """What autograd has recorded of one forward.

    params, inputs: what stands for the parameters and inputs that require a gradient, by name or path.
    owners, buffers: the parameters and buffers of the user, by name.
    edges: where the backward begins, for each output; None for an output without gradient.
    """

    params: Mapping[str, torch.Tensor]
    inputs: Mapping[str, torch.Tensor]
    owners: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    edges: list[GradientEdge | None] = field(default_factory=list)


class AutogradSession(GraphSession):
    """The session of one graph that autograd runs. Its plan holds communication only.

    run: runs the graph on all its arguments. names: those of the parameters and buffers among them.
    order: names of parameters, in the order of the outputs of the planner's model. numbers: their places there.
    """

    def __init__(
        self,
        planner: Planner,
        owner: ModuleSession,
        run: Callable[..., Sequence[Any]],
        names: Names,
        order: Sequence[str],
    ) -> None:
        super().__init__(planner, owner)
        self._run_graph = run
        self._names = names
        self.numbers = {name: number for number, name in enumerate(order)}
        self._owners: Mapping[str, nn.Parameter] = {}
        self._buffers: Mapping[str, torch.Tensor] = {}

    @property
    def params(self) -> Mapping[str, nn.Parameter]:
        return self._owners

    def compile(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Plan the communication. Raises what planning raises."""
        with lock_of(self.planner.model):
            self.planner.plan(self.take_apart(args))

    def take_apart(self, args: Sequence[Any]) -> Call:
        """Hold the parameters and buffers among these arguments. What is planned takes no others."""
        held = {name: value for name, value in zip(self._names, args, strict=True) if name is not None}
        model = self.planner.model
        assert isinstance(model, GradientsAsModel)
        model.hold(held)
        self._owners = {name: value for name, value in held.items() if isinstance(value, nn.Parameter)}
        self._buffers = {name: value for name, value in held.items() if name not in self._owners}
        return self.planner.take_apart((), {})

    def _forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Forward:
        with lock_of(self.planner.model):
            plan = self.planner.plan(self.take_apart(args))
            values, params, inputs = self._with_leaves(args)
            with torch.enable_grad():
                found = self._run_graph(*values)
            recorded = Recorded(params, inputs, self._owners, self._buffers)
        flat, nest = flatten_output(found, "output")
        recorded.edges.extend(get_gradient_edge(output) if output.requires_grad else None for _, output in flat)
        differentiable = tuple(edge is not None for edge in recorded.edges)
        outputs = guarded([output.detach() for _, output in flat], differentiable)
        given = {path: args[int(path.rpartition(".")[2])] for path in inputs}
        return Forward(plan, outputs, Outputs(nest, differentiable), given, (), [recorded], Versions())

    def _with_leaves(self, args: Sequence[Any]) -> tuple[list[Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The arguments with leaves in place of all that require a gradient: those of parameters, and of inputs."""
        values: list[Any] = []
        params: dict[str, torch.Tensor] = {}
        inputs: dict[str, torch.Tensor] = {}
        for place, (name, value) in enumerate(zip(self._names, args, strict=True)):
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                values.append(value)
            elif name is not None and name in self._owners:
                if name not in params:
                    params[name] = value.detach().requires_grad_()
                values.append(params[name])
            else:
                inputs[f"input.{place}"] = value.detach().requires_grad_()
                values.append(inputs[f"input.{place}"])
        for name, leaf in params.items():
            for hook in (self._owners[name]._backward_hooks or {}).values():
                leaf.register_hook(hook)
        return values, params, inputs

    def _backward(
        self, forward: Forward, gradients: tuple[torch.Tensor | None, ...], mode: str, keep: bool
    ) -> NamedGradients:
        [recorded] = values_of(forward)
        pairs = zip(recorded.edges, gradients, strict=True)
        begins = [(edge, grad) for edge, grad in pairs if edge is not None and grad is not None]
        if not keep:
            forward.values = None
        sent = _Sent(self, forward, recorded, mode, keep)
        with sent.taking_gradients():
            if begins:
                torch.autograd.backward([edge for edge, _ in begins], [grad for _, grad in begins], keep)
            return sent.finish()

    def begin(self, forward: Forward, recorded: Recorded, reached: Collection[str], mode: str, keep: bool) -> Arrivals:
        """Begin to send the gradients that a backward reaches. Returns what takes them."""
        absent = tuple(number for name, number in self.numbers.items() if name not in reached)
        plan = self.plan_of(forward.plan, mode, absent)
        executor = self._executor_of(plan)
        self._about_to_run(plan, executor, mode)
        # Where the backward may run again, what it reads stays as it is: what rank 0 sends is dropped.
        buffers = recorded.buffers
        if keep:
            buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        held = self.parts.unreduced(recorded.owners) if mode == "accumulated" else {}
        return executor.begin_backward([buffers[name] for name in executor.saved], held)


class _Sent:
    """The gradients of one backward, which are sent as they come."""

    def __init__(self, session: AutogradSession, forward: Forward, recorded: Recorded, mode: str, keep: bool) -> None:
        self._session = session
        self._forward = forward
        self._recorded = recorded
        self._mode = mode
        self._keep = keep
        self._arrivals: Arrivals | None = None
        self._came: dict[int, torch.Tensor] = {}
        self._local: dict[str, torch.Tensor] = {}
        self._refusal: NotAvailableError | None = None

    @contextmanager
    def taking_gradients(self) -> Iterator[None]:
        """Take each gradient of a parameter when autograd has come to its end."""
        handles = [
            leaf.register_post_accumulate_grad_hook(lambda leaf, name=name: self._take(name, leaf))
            for name, leaf in self._recorded.params.items()
        ]
        try:
            yield
        except BaseException as error:
            if self._arrivals is not None:
                self._arrivals.leave(error)
            raise
        finally:
            for handle in handles:
                handle.remove()
            for leaf in (*self._recorded.params.values(), *self._recorded.inputs.values()):
                leaf.grad = None

    def finish(self) -> NamedGradients:
        """All gradients, when autograd has come to the end of the graph. Raises NotAvailableError for a sparse one: by
        then all that the ranks send has been sent, so that they are at the same place."""
        of_inputs = {f"{path}.grad": leaf.grad for path, leaf in self._recorded.inputs.items() if leaf.grad is not None}
        if self._arrivals is None:
            return self._local, of_inputs
        grads, _ = self._arrivals.finish()
        if self._refusal is not None:
            if self._session.agreement is not None:
                self._session.agreement.end_step()
            raise self._refusal
        self._session._to_mean_of_active(grads, self._mode)
        return grads, of_inputs

    def _take(self, name: str, leaf: torch.Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None, "it has been accumulated"
        if self._mode == "local":
            self._local[name] = gradient
            return
        if gradient.layout is not torch.strided:
            self._refusal = NotAvailableError(
                f"parameter {name} has a gradient of layout {gradient.layout}, which is not reduced: make the "
                "embedding with sparse=False"
            )
            gradient = gradient.to_dense()
        if self._arrivals is None:
            reached = self._reached()
            self._arrivals = self._session.begin(self._forward, self._recorded, reached, self._mode, self._keep)
        self._came[self._session.numbers[name]] = gradient
        self._arrivals.take(self._came)

    def _reached(self) -> dict[str, None]:
        """The parameters that this backward reaches. Autograd knows them as soon as it has begun."""
        nodes = ((name, get_gradient_edge(leaf).node) for name, leaf in self._recorded.params.items())
        return {name: None for name, node in nodes if torch._C._will_engine_execute_node(node)}
