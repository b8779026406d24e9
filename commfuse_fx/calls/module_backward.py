"""The backward of a compiled module, as autograd runs it: which calls of one backward send, and where gradients go.

Why: docs/decisions.md, "The compiled backward writes `.grad`, not autograd".
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from commfuse_fx.calls.module_session import ModuleSession
from commfuse_fx.errors import CaptureError, NotAvailableError
from commfuse_fx.gradients.gradient_parts import write_gradients
from commfuse_fx.gradients.kept_forward import Forward
from commfuse_fx.gradients.watched_outputs import WatchedOutput, refuse_partial_gradients, watched_outputs
from commfuse_fx.support.tracebacks import user_frames_only

_BACKWARD_HOOKS, _LATE_HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")

Gradients = tuple[torch.Tensor | None, ...]

OnWritten = Callable[[Sequence[str], Sequence[str], str], None]
"""Is told the names of parameters whose `.grad` has been written, of those that the backward has not reached although
autograd leads there, and the mode of `ModuleSession.backward`."""


class Calls:
    """The calls of one module whose backward may still come, and the backward that runs now."""

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self.anchor = torch.zeros((), requires_grad=True)
            self._anchored = get_gradient_edge(self.anchor).node
        """An input of every call: without an edge to anything, autograd would not run a backward."""
        self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        self._task = -1
        self._syncs = False
        self.all_sync = False
        """Whether every backward reduces, whatever its forward has said."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Calls, ()  # a copy has run nothing yet

    def add(self, node: Any) -> None:
        """A forward has been run; `node` is what autograd runs for its backward."""
        self._waiting.add(node)

    def sends(self, node: Any, task: int) -> bool:
        """Whether this call is the one that reduces in this backward: the last one of those that it reaches."""
        if task != self._task:
            self._task, self._syncs = task, False
        self._syncs = self._syncs or node.call.syncs or self.all_sync
        node.call.done_in = task
        others = (other for other in self._waiting if other is not node and other.call.done_in != task)
        return self._syncs and not any(torch._C._will_engine_execute_node(other) for other in others)

    def are_for_all(self) -> bool:
        """Whether the backward that runs now is for all leaves, rather than for some that its caller names."""
        return _asked_for(self._anchored) is True


class ModuleCall:
    """One call of a module.

    syncs: whether its backward is to reduce gradients.
    params: those that require a gradient, by name. edges: the names of those that autograd leads to.

    A hook of a parameter (`register_hook`) is part of the graph. Autograd would call it once more, with None, so it
    does not lead to such a parameter. Nor does it to one with a post-accumulate-grad hook that a backward may not
    reach: autograd would call the hook all the same. Such hooks are called here.
    watched: what hooks of outputs have to be looked at, as some outputs are computed from others.
    """

    def __init__(
        self, session: ModuleSession, forward: Forward, calls: Calls, syncs: bool, on_written: OnWritten | None = None
    ) -> None:
        self.session = session
        self.forward = forward
        self.calls = calls
        self.syncs = syncs
        self.on_written = on_written
        self.done_in = -1
        self.params = {name: param for name, param in session.params.items() if param.requires_grad}
        self.edges = list(forward.plan.compiled.program.grads)
        if any(map(_BACKWARD_HOOKS, self.params.values())) or any(map(_LATE_HOOKS, self.params.values())):
            self.edges = [name for name in self.edges if not self._calls_hooks_of(name)]
        self.watched: list[WatchedOutput] = []

    def _calls_hooks_of(self, name: str) -> bool:
        param = self.params[name]
        if param._backward_hooks or not param._post_accumulate_grad_hooks:
            return bool(param._backward_hooks)
        is_always_reached = sum(self.forward.described.differentiable) == 1
        return not is_always_reached or self.session.planner.config.find_unused_parameters

    def apply(self) -> Sequence[torch.Tensor]:
        """The outputs, which autograd knows to come from the parameters and inputs."""
        if not any(self.forward.described.differentiable):
            return self.forward.outputs
        leaves: list[torch.Tensor] = [self.params[name] for name in self.edges]
        leaves.append(self.calls.anchor)
        outputs: tuple[torch.Tensor, ...] = _Backward.apply(self, *leaves, *self.forward.inputs.values())  # type: ignore[no-untyped-call]
        self.watched = watched_outputs(self.forward.described, outputs)
        self.forward.outputs = []  # they lead to this call, and it may not hold them
        self.calls.add(next(output.grad_fn for output in outputs if output.grad_fn is not None))
        return outputs

    def backward(self, node: Any, gradients: Gradients) -> Gradients:
        """Gradients for autograd: of the inputs, and of parameters that it has been asked for itself. Those that
        `.grad` is to hold are written here."""
        if torch.is_grad_enabled():
            raise NotAvailableError(
                "create_graph=True through a compiled module is not available yet: compute what needs gradients of "
                "gradients inside of the model's forward, with torch.autograd.grad(..., create_graph=True) there"
            )
        self._check_hooks(gradients)
        asked: dict[str, bool | None] = {}
        if self.calls.are_for_all():
            written = list(self.params)
        else:
            asked = {name: _asked_for(edge) for name, (edge, _) in zip(self.edges, node.next_functions, strict=False)}
            written = [name for name, is_asked in asked.items() if is_asked]
        with torch._C.DisableTorchFunctionSubclass():
            mode = self._mode(node, bool(written))
        keep = bool(torch._C._autograd._get_current_graph_task_keep_graph())
        grads, of_inputs = self.session.backward(self.forward, gradients, mode, keep)
        reached = [name for name in written if name in grads]
        parts = self.session.parts
        if mode == "local":
            parts.will_be_local(reached, self.params)
        write_gradients(self.params, {name: grads[name] for name in reached}, mode, parts)
        if mode == "local":
            parts.was_local(reached)
        else:
            parts.was_reduced(reached, self.params)
        if self.on_written is not None:
            self.on_written(reached, [name for name in written if name not in grads], mode)
        if len(self.edges) < len(self.params):  # of the others, autograd calls them
            for name in [name for name in reached if name not in self.edges]:
                for hook in tuple((self.params[name]._post_accumulate_grad_hooks or {}).values()):
                    hook(self.params[name])
        returned: Gradients = (None,) * len(self.edges)
        if asked:
            returned = tuple(grads.get(name) if asked.get(name, True) is None else None for name in self.edges)
        return (*returned, None, *(of_inputs.get(f"{path}.grad") for path in self.forward.inputs))

    def _mode(self, node: Any, writes: bool) -> str:
        task = torch._C._current_graph_task_id()
        if not self.calls.sends(node, task) or not writes or self.session.agreement is None:
            return "local"
        return "accumulated" if self.session.parts.has_unreduced(self.params) else "reduced"

    def _check_hooks(self, gradients: Gradients) -> None:
        """Raises CaptureError for hooks that would see other gradients than they do in eager execution."""
        try:
            refuse_partial_gradients(self.watched, gradients)
            hooks = zip(self.edges, map(_BACKWARD_HOOKS, map(self.params.__getitem__, self.edges)), strict=True)
            late = next((name for name, held in hooks if held), None)
            if late is not None:
                raise CaptureError(
                    f"parameter {late} got a hook between the forward and the backward of a compiled module: call "
                    "register_hook before the forward"
                )
        except CaptureError as error:
            if self.syncs or self.calls.all_sync:
                self.session.tell(error)
            raise


class _Backward(torch.autograd.Function):
    """The edge between the caller's graph and the compiled one."""

    @staticmethod
    def forward(ctx: Any, call: ModuleCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs = _distinct(call.forward.outputs)
        described = zip(outputs, call.forward.described.differentiable, strict=True)
        ctx.mark_non_differentiable(*(output for output, differentiable in described if not differentiable))
        return outputs

    @staticmethod
    @torch._disable_dynamo  # a function under torch.compile may start the backward
    @user_frames_only
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Gradients:
        return (None, *ctx.call.backward(ctx, gradients))


def _distinct(outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The same values, in a tensor each: autograd keeps what it knows of an output (`y`, `y.detach()`) by tensor."""
    seen: dict[int, None] = {}
    found = []
    for output in outputs:
        found.append(output.detach() if id(output) in seen else output)
        seen[id(output)] = None
    return tuple(found)


def _asked_for(edge: Any) -> bool | None:
    """Whether this backward writes the gradient of a parameter to `.grad`; None: its caller gets it."""
    if edge is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(edge))
    except RuntimeError:  # torch.autograd.grad hands it to its caller
        return None


def learns(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether anything that a call reads requires a gradient."""
    if any(param.requires_grad for param in model.parameters()):
        return True
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs)))
