"""Reduces, at the end of a backward, the gradients that no compiled graph has reduced.

Dynamo leaves some of a model to Python: a disabled submodule, a frame that it has compiled too often, graphs for any
size. What autograd computes there is seen by a hook of each parameter. With find_unused_parameters=True ranks may run
different graphs, so that all parameters are reduced here.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from commfuse_fx.capture.graph_of_dynamo import register
from commfuse_fx.errors import NotAvailableError
from commfuse_fx.frontends.compiled_call import CompiledCall
from commfuse_fx.frontends.graph_session import GraphCalls
from commfuse_fx.support.logs import logger

_RUNTIME = logger("runtime")
_MOST = 8  # of what is kept: plans for sets of parameters, and backwards that run inside of each other


class _Gradients(nn.Module):
    """A model whose outputs are its parameters, so that gradients of the outputs are those to reduce.

    Its parameters stand for those of the user, whose hooks have run already.
    reached: None, or a parameter that counts which of the others a rank has reached.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        reached: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        for name, param in params.items():
            register(self, name, _stand_in(param))
        for name, buffer in buffers.items():
            register(self, name, buffer)
        if reached is not None:
            register(self, _REACHED, reached)

    def hold(self, params: Mapping[str, nn.Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
        """Stand for these parameters, and send these buffers, from now on: some may have been replaced."""
        for name, tensor in (*params.items(), *buffers.items()):
            part, _, leaf = name.rpartition(".")
            holder = self.get_submodule(part)
            held = getattr(holder, leaf)
            if name in buffers and held is not tensor:
                setattr(holder, leaf, tensor)
            elif name in params and not _stands_for(held, params[name]):
                setattr(holder, leaf, _stand_in(params[name]))

    def forward(self) -> list[torch.Tensor]:
        return [param.view_as(param) for param in self.parameters()]


def _stand_in(param: nn.Parameter) -> nn.Parameter:
    found = nn.Parameter(param.detach())
    found.__dict__ = param.__dict__  # the marks
    return found


def _stands_for(one: torch.Tensor, param: nn.Parameter) -> bool:
    return one.__dict__ is param.__dict__ and one.data_ptr() == param.data_ptr() and one.dtype == param.dtype


_REACHED = "reached_parameters"


_Key = tuple[tuple[str, ...], tuple[str, ...]]
"""Names of the buffers that are sent and of the parameters whose gradients are reduced."""


@dataclass
class _Backward:
    """may_run_again: so that buffers stay as they were in the forward.

    open: parameters whose gradients are not reduced. reduced: gradients that graphs have reduced, with their versions.
    sent: buffers that graphs have sent.
    """

    may_run_again: bool
    open: dict[str, None] = field(default_factory=dict)
    reduced: dict[str, tuple[torch.Tensor | None, int]] = field(default_factory=dict)
    sent: dict[str, None] = field(default_factory=dict)


class LateReduction:
    """Knows for every backward which gradients are still to be reduced.

    syncs: whether the last forward was one whose backward reduces.
    """

    def __init__(self, owner: CompiledCall) -> None:
        self.syncs = True
        self._owner = owner
        self._find_unused = owner.config.find_unused_parameters
        self._params: dict[str, nn.Parameter] = {}
        self._buffers: Mapping[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}
        self._hooks: dict[str, RemovableHandle] = {}
        self._expected: dict[str, None] = {}  # what a graph for any size reads
        self._warned: dict[str, None] = {}
        self._backwards: dict[int, _Backward] = {}
        self._reached: dict[str, None] = {}  # since gradients were reduced last
        self._made: dict[_Key, tuple[_Gradients, GraphCalls]] = {}
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def watch(self, params: Mapping[str, nn.Parameter]) -> None:
        """Look at these parameters from now on, in place of those before. They may be frozen and unfrozen later."""
        for name, param in params.items():
            if self._params.get(name) is not param and name in self._hooks:
                self._hooks.pop(name).remove()
            if param.requires_grad and name not in self._hooks:
                self._hooks[name] = param.register_post_accumulate_grad_hook(_Hook(self))
        if len(self._params) != len(params) or any(self._params.get(name) is not params[name] for name in params):
            self._params = dict(params)
            self._names = {id(param): name for name, param in params.items()}

    def send_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Let rank 0 send those of them that no graph sends, at the end of every backward that reduces and cannot run
        again."""
        self._buffers = buffers

    def expect(self, names: Sequence[str]) -> None:
        """No warning for these: they belong to a graph for any size."""
        self._expected.update(dict.fromkeys(names))

    def wrote(self, buffers: Sequence[str], names: Sequence[str], mode: str) -> None:
        """A compiled backward has written `.grad` of the parameters of these names. mode: as in `Situation`.

        buffers: what it has sent, if it has reduced gradients.
        """
        if not names:
            return
        now = self._now()
        if mode != "local":
            now.sent.update(dict.fromkeys(buffers))
        self._reached.update(dict.fromkeys(names))
        for name in names:
            if mode == "local":
                now.open[name] = None
            else:
                now.open.pop(name, None)
                grad = self._params[name].grad
                now.reduced[name] = (grad, -1 if grad is None else grad._version)

    def accumulated(self, param: torch.Tensor) -> None:
        """Autograd has come to the end of a parameter: a compiled backward has written its gradient, or autograd."""
        name = self._names.get(id(param))
        if name is None:
            return
        now = self._now()
        if name in now.reduced:
            grad, version = now.reduced[name]
            if param.grad is None or (param.grad is grad and grad._version == version):
                return
        self._reached[name] = None
        now.open[name] = None

    def _now(self) -> _Backward:
        """The backward that runs now. Activation checkpointing may run another one inside of it."""
        task = torch._C._current_graph_task_id()
        if task not in self._backwards:
            if len(self._backwards) >= _MOST:  # backwards that have failed
                self._backwards.pop(next(iter(self._backwards)))
            self._backwards[task] = _Backward(bool(torch._C._autograd._get_current_graph_task_keep_graph()))
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task))
        return self._backwards[task]

    def _end(self, task: int) -> None:
        now = self._backwards.pop(task)
        if not self.syncs or self._owner.session.agreement is None:
            return
        buffers = (
            {} if now.may_run_again else {n: b for n, b in self._buffers.items() if n not in now.sent and b.numel()}
        )
        if self._find_unused:
            self._reduce_all(buffers)
        elif now.open or buffers:
            names = [name for name in self._params if name in now.open]
            self._warn([name for name in names if name not in self._expected])
            self._reduce(names, buffers)
        self._reached.clear()

    def _reduce(self, names: Sequence[str], buffers: Mapping[str, torch.Tensor]) -> None:
        params = {name: self._params[name] for name in names}
        _refuse(params)
        if not params:  # buffers alone: gradients of nothing go with them
            self._run({}, buffers, torch.zeros(1, device=next(iter(buffers.values())).device))
            return
        _write(params, self._run(params, buffers, None))

    def _reduce_all(self, buffers: Mapping[str, torch.Tensor]) -> None:
        params = {name: param for name, param in self._params.items() if param.requires_grad}
        _refuse(params)
        device = next((param.device for param in params.values()), None)
        reached = torch.tensor([float(name in self._reached) for name in params], device=device)
        found = self._run(params, buffers, reached)
        ranks = found.pop(_REACHED).tolist()
        _write({name: params[name] for name, count in zip(params, ranks, strict=True) if count}, found)

    def _run(
        self, params: Mapping[str, nn.Parameter], buffers: Mapping[str, torch.Tensor], reached: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Reduce the gradients of these parameters and the counts, and send the buffers."""
        key = tuple(buffers), tuple(params)
        if key not in self._made:
            if len(self._made) >= _MOST:
                self._made.clear()
            counts = None if reached is None else nn.Parameter(torch.zeros_like(reached))
            made = _Gradients(params, buffers, counts)
            self._made[key] = made, GraphCalls(made, self._owner)
        model, calls = self._made[key]
        model.hold(params, buffers)
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in params.items()}
        return calls.reduce(grads if reached is None else {**grads, _REACHED: reached})

    def forget(self) -> None:
        """Drop what has been compiled."""
        self._made.clear()

    def made(self) -> list[GraphCalls]:
        """What has been compiled for gradients that no graph has reduced."""
        return [calls for _, calls in self._made.values()]

    def _warn(self, names: Sequence[str]) -> None:
        new = [name for name in names if name not in self._warned]
        if new:
            self._warned.update(dict.fromkeys(new))
            _RUNTIME.warning(
                "%s%s got a gradient that no compiled graph has computed: Dynamo has left a part of the model to "
                "Python (a disabled function, or a frame that was compiled too often; TORCH_LOGS=graph_breaks,"
                "recompiles says where). It is reduced at the end of the backward, where nothing hides it",
                new[0],
                f" and {len(new) - 1} other parameters" if len(new) > 1 else "",
            )


class _Hook:
    """Tells, as long as somebody listens, that autograd has come to the end of a parameter."""

    def __init__(self, listener: LateReduction) -> None:
        self._listener = weakref.ref(listener)

    def __call__(self, param: torch.Tensor) -> None:
        listener = self._listener()
        if listener is not None:
            listener.accumulated(param)


def _remove(hooks: Mapping[str, RemovableHandle]) -> None:
    for hook in hooks.values():
        hook.remove()


def _refuse(params: Mapping[str, nn.Parameter]) -> None:
    for name, param in params.items():
        if param.grad is not None and param.grad.layout is not torch.strided:
            raise NotAvailableError(
                f"parameter {name} has a gradient of layout {param.grad.layout}, which is not reduced: make the "
                "embedding with sparse=False"
            )
        if not all(isinstance(hook, _Hook) for hook in (param._post_accumulate_grad_hooks or {}).values()):
            raise NotAvailableError(
                f"parameter {name} has a hook of register_post_accumulate_grad_hook, and its gradient is reduced at "
                "the end of the backward, after such hooks have run: take the hook away and do its work after "
                'backward(), or let capture="trace" compile the whole model'
            )


def _write(params: Mapping[str, nn.Parameter], found: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, param in params.items():
            if param.grad is None:
                param.grad = found[name]
            else:
                param.grad.copy_(found[name])
