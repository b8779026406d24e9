"""Reduces, at the end of a backward, the gradients that no compiled graph has reduced.

Dynamo leaves some of a model to Python: a disabled submodule, a frame that it has compiled too often, graphs for any
size. What autograd computes there is seen by a hook of each parameter. With find_unused_parameters=True ranks may run
different graphs, so that all parameters are reduced here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from commfuse_fx.capture.gradients_as_model import GradientsAsModel
from commfuse_fx.errors import NotAvailableError
from commfuse_fx.frontends.compiled_call import CompiledCall
from commfuse_fx.frontends.graph_session import GraphCalls
from commfuse_fx.frontends.module_session import ModuleSession
from commfuse_fx.frontends.parameter_hooks import LateHook, ParameterHooks
from commfuse_fx.inspect.lowered import Lowered
from commfuse_fx.support.logs import logger

_RUNTIME = logger("runtime")
_MOST = 8  # of what is kept: plans for sets of parameters, and backwards that run inside of each other


_COUNTS = "reached_parameters"
"""The name of the parameter that counts which of the others a rank has reached."""


_Key = tuple[tuple[str, ...], tuple[str, ...]]
"""Names of the buffers that are sent and of the parameters whose gradients are reduced."""


@dataclass
class _Backward:
    """may_run_again: so that buffers stay as they were in the forward.

    open: parameters whose gradients are not reduced. settled: gradients that graphs have reduced, or not reached, with
    their versions.
    sent: buffers that graphs have sent. aside: sums that gradients of this rank may not be added to.
    """

    may_run_again: bool
    open: dict[str, None] = field(default_factory=dict)
    settled: dict[str, tuple[torch.Tensor | None, int]] = field(default_factory=dict)
    sent: dict[str, None] = field(default_factory=dict)
    aside: dict[str, torch.Tensor] = field(default_factory=dict)


class LateReduction:
    """Knows for every backward which gradients are still to be reduced.

    syncs: whether the last forward was one whose backward reduces.
    """

    def __init__(self, owner: CompiledCall) -> None:
        assert isinstance(owner.session, ModuleSession)
        self.syncs = True
        self._owner = owner
        self._find_unused = owner.config.find_unused_parameters
        self._parts = owner.session.parts
        late = weakref.ref(self)  # whatever writes gradients here holds this object
        self._parts.put_aside = lambda name: None if (found := late()) is None else found._put_aside(name)
        self._hooks = ParameterHooks(self, tells_before=self._parts.sums)
        self._buffers: Mapping[str, torch.Tensor] = {}
        self._expected: dict[str, None] = {}  # what a graph for any size reads
        self._warned: dict[str, None] = {}
        self._backwards: dict[int, _Backward] = {}
        self._made: dict[_Key, tuple[GradientsAsModel, GraphCalls]] = {}

    def watch(self, params: Mapping[str, nn.Parameter]) -> None:
        """Look at these parameters from now on, in place of those before. They may be frozen and unfrozen later."""
        self._hooks.watch(params)

    def send_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Let rank 0 send those of them that no graph sends, at the end of every backward that reduces and cannot run
        again."""
        self._buffers = buffers

    def expect(self, names: Sequence[str]) -> None:
        """No warning for these: they belong to a graph for any size."""
        self._expected.update(dict.fromkeys(names))

    def wrote(self, buffers: Sequence[str], names: Sequence[str], passed: Sequence[str], mode: str) -> None:
        """A compiled backward has written `.grad` of the parameters of these names. mode: as in `Situation`.

        buffers: what it has sent, if it has reduced gradients. passed: parameters to which autograd leads, and which
            the backward has not reached.
        """
        if not names and not passed:
            return
        now = self._now()
        if mode != "local" and names:
            now.sent.update(dict.fromkeys(buffers))
        for name in names:
            if mode == "local":
                now.open[name] = None
            else:
                now.open.pop(name, None)
                now.settled[name] = self._as_it_is(name)
        for name in passed:
            now.settled.setdefault(name, self._as_it_is(name))

    def _as_it_is(self, name: str) -> tuple[torch.Tensor | None, int]:
        grad = self._hooks.params[name].grad
        return grad, -1 if grad is None else grad._version

    def accumulates(self, name: str) -> None:
        """Autograd is about to add to a gradient."""
        self._parts.will_be_local([name], self._hooks.params)

    def accumulated(self, name: str) -> None:
        """Autograd has come to the end of a parameter: a compiled backward has written its gradient, or autograd."""
        now, param = self._now(), self._hooks.params[name]
        if name in now.settled:
            grad, version = now.settled[name]
            if param.grad is None or (param.grad is grad and grad._version == version):
                return
        self._parts.was_local([name])
        now.open[name] = None

    def _put_aside(self, name: str) -> None:
        """Take a sum over the ranks out of `.grad`, until what is added there has been reduced as well."""
        param = self._hooks.params[name]
        if not self.syncs:
            self._parts.refuse(name, param)
            return
        assert param.grad is not None, "it holds a sum"
        aside = self._now().aside
        if name in aside:
            aside[name].add_(param.grad)
        else:
            aside[name] = param.grad
        param.grad = None

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
        try:
            self._reduce_rest(now)
        finally:
            self._put_back(now.aside)

    def _reduce_rest(self, now: _Backward) -> None:
        buffers = (
            {} if now.may_run_again else {n: b for n, b in self._buffers.items() if n not in now.sent and b.numel()}
        )
        if self._find_unused:
            self._reduce_all(buffers)
        elif now.open or buffers:
            names = [name for name in self._hooks.params if name in now.open]
            self._warn([name for name in names if name not in self._expected])
            self._reduce(names, buffers)

    def _reduce(self, names: Sequence[str], buffers: Mapping[str, torch.Tensor]) -> None:
        params = {name: self._hooks.params[name] for name in names}
        _refuse(params)
        if not params:  # buffers alone: gradients of nothing go with them
            self._run({}, buffers, torch.zeros(1, device=next(iter(buffers.values())).device))
            return
        self._write(names, self._run(params, buffers, None))
        self._parts.was_reduced(names)

    def _reduce_all(self, buffers: Mapping[str, torch.Tensor]) -> None:
        params = {name: param for name, param in self._hooks.params.items() if param.requires_grad}
        _refuse(params)
        device = next((param.device for param in params.values()), None)
        reached = torch.tensor([float(name in self._parts.local) for name in params], device=device)
        found = self._run(params, buffers, reached)
        ranks = found.pop(_COUNTS).tolist()
        self._write([name for name, count in zip(params, ranks, strict=True) if count], found)
        self._parts.was_reduced(list(params))

    def _run(
        self, params: Mapping[str, nn.Parameter], buffers: Mapping[str, torch.Tensor], reached: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Reduce the gradients of these parameters and the counts, and send the buffers."""
        calls = self._calls_for(params, buffers, reached)
        held = self._parts.unreduced(params)
        grads = {name: torch.zeros_like(params[name]) if grad is None else grad for name, grad in held.items()}
        return calls.reduce(grads if reached is None else {**grads, _COUNTS: reached})

    def _calls_for(
        self, params: Mapping[str, nn.Parameter], buffers: Mapping[str, torch.Tensor], reached: torch.Tensor | None
    ) -> GraphCalls:
        key = tuple(buffers), tuple(params)
        if key not in self._made:
            if len(self._made) >= _MOST:
                self._made.clear()
            counts = {} if reached is None else {_COUNTS: nn.Parameter(torch.zeros_like(reached))}
            made = GradientsAsModel({**params, **buffers, **counts})
            self._made[key] = made, GraphCalls(made, self._owner)
        model, calls = self._made[key]
        model.hold({**params, **buffers})
        return calls

    def lower(self, reached: Iterable[str], params: Mapping[str, nn.Parameter], sent: Iterable[str]) -> list[Lowered]:
        """What would be reduced at the end of a backward, to read; empty if nothing is.

        reached: names of the parameters that autograd adds to by itself. params: those of the model. sent: names of
        buffers that graphs send.
        """
        config, device = self._owner.config, next((param.device for param in params.values()), None)
        if self._owner.mesh.world == 1 or config.parallel_mode == "stand_alone":
            return []
        open_names = dict.fromkeys(reached)
        sent_names = () if self._find_unused else dict.fromkeys(sent)
        chosen = {n: p for n, p in params.items() if p.requires_grad and (self._find_unused or n in open_names)}
        buffers = {n: b for n, b in self._buffers.items() if n not in sent_names and b.numel()}
        counts = torch.zeros(len(chosen) or 1, device=device)
        if not chosen and not buffers:
            return []
        return [self._calls_for(chosen, buffers, counts if self._find_unused or not chosen else None).read(())]

    def _write(self, names: Iterable[str], found: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name in names:
                param = self._hooks.params[name]
                if param.grad is None:
                    param.grad = found[name]
                elif self._parts.is_sum(name, param):
                    param.grad.add_(found[name])
                else:
                    param.grad.copy_(found[name])

    def _put_back(self, aside: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, total in aside.items():
                param = self._hooks.params[name]
                if param.grad is not None:
                    total.add_(param.grad)
                param.grad = total

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


def _refuse(params: Mapping[str, nn.Parameter]) -> None:
    for name, param in params.items():
        if param.grad is not None and param.grad.layout is not torch.strided:
            raise NotAvailableError(
                f"parameter {name} has a gradient of layout {param.grad.layout}, which is not reduced: make the "
                "embedding with sparse=False"
            )
        if not all(isinstance(hook, LateHook) for hook in (param._post_accumulate_grad_hooks or {}).values()):
            raise NotAvailableError(
                f"parameter {name} has a hook of register_post_accumulate_grad_hook, and its gradient is reduced at "
                "the end of the backward, after such hooks have run: take the hook away and do its work after "
                'backward(), or let capture="trace" compile the whole model'
            )
