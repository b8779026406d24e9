"""Reduces, at the end of a backward, the gradients that no compiled graph has reduced.

Dynamo leaves some of a model to Python: a disabled submodule, a frame that it has compiled too often, graphs for any
size. What autograd computes there is seen by a hook of each parameter. With find_unused_parameters=True ranks may run
different graphs, so that all parameters are reduced here.

Why: docs/decisions.md, "What no graph has reduced is reduced at the end of the backward".
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from commfuse_fx.calls.compiled_call import CompiledCall
from commfuse_fx.calls.late.late_graphs import LateGraphs, refuse_held
from commfuse_fx.calls.module_session import ModuleSession
from commfuse_fx.config.fusion_marks import is_of_each_rank
from commfuse_fx.gradients.parameter_hooks import ParameterHooks
from commfuse_fx.gradients.running_backwards import LOOKED_AT, RunningBackward, RunningBackwards
from commfuse_fx.inspect.explain_graphs import COUNTS
from commfuse_fx.support.logs import logger

_RUNTIME = logger("runtime")


class LateReduction:
    """Knows for every backward which gradients are still to be reduced.

    syncs: whether the last forward was one whose backward reduces. graphs: what reduces them.
    """

    def __init__(self, owner: CompiledCall) -> None:
        assert isinstance(owner.session, ModuleSession)
        self.syncs = True
        self.graphs = LateGraphs(owner, owner.session.parts)
        self._find_unused = owner.config.find_unused_parameters
        self._session = owner.session
        self._parts = owner.session.parts
        late = weakref.ref(self)  # whatever writes gradients here holds this object
        self._parts.put_aside = lambda name: None if (found := late()) is None else found._put_aside(name)
        self._hooks = ParameterHooks(self)
        self._buffers: Mapping[str, torch.Tensor] = {}
        self._expected: dict[str, None] = {}  # what a graph for any size reads
        self._warned: dict[str, None] = {}
        self._running = RunningBackwards()
        self._ends = 0  # backwards at whose end ranks have agreed that nothing is left

    def watch(self, params: Mapping[str, nn.Parameter]) -> None:
        """Look at these parameters from now on, in place of those before. They may be frozen and unfrozen later."""
        self._hooks.watch(params, tells_before=self._parts.sums or self._are_absent)

    def unwatch(self, params: Sequence[str]) -> None:
        """No longer look at the parameters of these names."""
        left = {name: param for name, param in self._hooks.params.items() if name not in params}
        self.watch(left)

    def begin(self, syncs: bool) -> None:
        """A forward begins. syncs: whether its backward reduces."""
        self.syncs = syncs
        self._parts.counts_absent = self._are_absent
        if torch._C._current_graph_task_id() != -1:
            return  # activation checkpointing computes a forward again
        self._parts.means.clear()

    def follow(self, outputs: Iterable[torch.Tensor]) -> None:
        """The backward begins at these outputs of the model."""
        self._running.follow(outputs, self._end)

    @property
    def _are_absent(self) -> bool:
        return self._session.uneven is not None and self._session.uneven.are_absent

    def send_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Let rank 0 send those of them that no graph sends, at the end of every backward that reduces and cannot run
        again."""
        mode = self._session.planner.config.parallel_mode
        self._buffers = {name: each for name, each in buffers.items() if not is_of_each_rank(each, mode)}

    def expect(self, names: Sequence[str]) -> None:
        """No warning for these: they belong to a graph for any size."""
        self._expected.update(dict.fromkeys(names))

    def wrote(self, buffers: Sequence[str], names: Sequence[str], passed: Sequence[str], mode: str) -> None:
        """A compiled backward has written `.grad` of the parameters of these names. mode: as in `Situation`.

        buffers: what it has sent, if it has reduced gradients. passed: parameters to which autograd leads, and which
            the backward has not reached.
        """
        known = self._hooks.params  # a model may be gone before its backward runs
        names, passed = [n for n in names if n in known], [n for n in passed if n in known]
        if not names and not passed:
            return
        now = self._now()
        now.has_gradients = True
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
        now.has_gradients = True
        if name in now.settled:
            grad, version = now.settled[name]
            if param.grad is None or (param.grad is grad and grad._version == version):
                return
        self._parts.was_local([name])
        now.open[name] = None

    def _put_aside(self, name: str) -> None:
        """Take what is final out of `.grad`, until what is added there has been reduced as well."""
        param = self._hooks.params[name]
        if not self.syncs:
            self._parts.refuse(name, param)
            return
        assert param.grad is not None, "it holds a sum"
        self._now().put_aside(name, param.grad)
        param.grad = None

    def _now(self) -> RunningBackward:
        return self._running.now(self._end)

    def _end(self, now: RunningBackward) -> None:
        if not now.has_gradients or not self.syncs or self._session.uneven is None:
            return
        try:
            has_reduced = self._reduce_rest(now)
        except Exception as error:
            self._session.tell(error)
            raise
        finally:
            now.put_back(self._hooks.params)
        uneven = self._session.uneven
        if not has_reduced and uneven.roll is None and self._ends < LOOKED_AT:  # all ranks have as many of these
            self._ends += 1
            uneven.agree_on_end()
        uneven.end()

    def _reduce_rest(self, now: RunningBackward) -> bool:
        """Reduce what is left. Returns whether something is."""
        buffers: Mapping[str, torch.Tensor] = {}
        if not now.may_run_again:  # what it reads would change
            buffers = {n: b for n, b in self._buffers.items() if n not in now.sent and b.numel()}
        if self._find_unused:
            self._reduce_all(buffers)
            return True
        params = now.to_reduce(self._hooks.params, self._parts.local)
        if not params and not buffers:
            return False
        self._warn([name for name in params if name in now.open and name not in self._expected])
        self.graphs.reduce_held(params, buffers)
        return True

    def _reduce_all(self, buffers: Mapping[str, torch.Tensor]) -> None:
        params = {name: param for name, param in self._hooks.params.items() if param.requires_grad}
        refuse_held(params)
        device = next((param.device for param in params.values()), None)
        reached = torch.tensor([float(name in self._parts.local) for name in params], device=device)
        found = self.graphs.reduce(params, buffers, reached)
        ranks = found.pop(COUNTS).tolist()
        self.graphs.write({n: param for (n, param), count in zip(params.items(), ranks, strict=True) if count}, found)
        self._parts.was_reduced(list(params), params)

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
