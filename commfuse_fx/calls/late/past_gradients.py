"""Reduces, at the end of a backward, gradients that come past the compiled one.

Such are those of a penalty on parameters, of a parameter that only the loss reads, or of a call of the model itself.
Autograd adds them to `.grad` after the compiled backward has written it. DistributedDataParallel reduces the sum.

Why: docs/decisions.md, "What no graph has reduced is reduced at the end of the backward".
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from commfuse_fx.calls.compiled_call import CompiledCall
from commfuse_fx.calls.late.late_graphs import LateGraphs
from commfuse_fx.calls.module_session import ModuleSession
from commfuse_fx.errors import CommFuseError
from commfuse_fx.gradients.running_backwards import LOOKED_AT, RunningBackward, RunningBackwards
from commfuse_fx.planning.plan_cache import Plan
from commfuse_fx.support.logs import logger

_RUNTIME = logger("runtime")

_grad, _version = attrgetter("grad"), attrgetter("_version")


class PastGradients:
    """Knows for every backward what autograd adds to the gradients of a compiled module.

    In the first backwards that reduce, it looks at all parameters, and ranks agree at the end that nothing has come.
    Later it looks at those that the module's graph does not reach, and at those to which something has come before. Of
    the others it compares the versions of their gradients.
    """

    def __init__(self, owner: CompiledCall) -> None:
        assert isinstance(owner.session, ModuleSession) and owner.session.uneven is not None, "several ranks"
        self._session = owner.session
        self._uneven = owner.session.uneven
        self._parts = owner.session.parts
        self._finds_unused = owner.config.find_unused_parameters
        self._graphs = LateGraphs(owner, self._parts)
        self._running = RunningBackwards()
        self._hooks: dict[str, _Hook] = {}
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self._known: dict[str, None] = {}
        self._seen: tuple[Plan | None, Mapping[str, nn.Parameter], int] = (None, {}, 0)
        # Backwards outside of a `Join` context, where all ranks have as many, and inside.
        self._ends = [0, 0]

    def begin(self) -> None:
        """A forward begins."""
        self._parts.counts_absent = self._uneven.are_absent
        if torch._C._current_graph_task_id() == -1:  # else activation checkpointing computes a forward again
            self._parts.means.clear()

    def look(self, plan: Plan) -> None:
        """Look at parameters from now on. plan: that of the forward that has been run."""
        held = self._session.params
        if self._seen[0] is plan and self._seen[1] is held and self._seen[2] == self._watched:
            return
        self._seen = plan, held, self._watched
        reached, divided = plan.compiled.program.grads, self._parts.rows or ()  # autograd may not add to these
        params = {
            name: param
            for name, param in held.items()
            if param.requires_grad and (self._looks or name not in reached or name in self._known or name in divided)
        }
        _remove({name: hook for name, hook in self._hooks.items() if hook.param is not params.get(name)})
        for name in [name for name, hook in self._hooks.items() if hook.param is None]:
            del self._hooks[name]
        for name, param in params.items():
            if name not in self._hooks:
                self._hooks[name] = _Hook(weakref.ref(self), name, param)

    @property
    def _looks(self) -> bool:
        return self._ends[self._uneven.roll is not None] < LOOKED_AT

    @property
    def _watched(self) -> int:
        """Grows when other parameters are to be looked at."""
        return len(self._known) + int(not self._looks)

    def comes(self, name: str, param: nn.Parameter) -> None:
        """Autograd is about to add to the gradient of a parameter."""
        now = self._running.now(self._end)
        if param.grad is not None and (name in now.written or self._parts.is_final(name, param)):
            now.put_aside(name, param.grad)
            param.grad = None
        self._parts.was_local([name])
        now.open[name] = None

    def wrote(self, names: Sequence[str], passed: Sequence[str], mode: str) -> None:
        """A compiled backward has written `.grad` of the parameters of these names, and not of those it has passed.

        mode: as in `Situation`.
        """
        if mode == "local":
            return
        now = self._running.now(self._end)
        now.has_gradients = True
        for name in names:
            now.open.pop(name, None)
        params = self._session.params
        held = map(_grad, map(params.__getitem__, names))
        now.written = dict(zip(names, held, strict=True))
        now.versions = list(map(_version, now.written.values()))

    def _end(self, now: RunningBackward) -> None:
        params = self._session.params
        try:
            if now.has_gradients:
                self._notice_changes(now)
                if now.open or self._looks or self._parts.local:
                    self._reduce(now)
        except Exception as error:
            self._session.tell(error)
            raise
        finally:
            now.put_back(params)
        if now.has_gradients:
            self._uneven.end()
        else:
            for name in now.aside if self._parts.sums else ():
                self._parts.refuse(name, params[name])

    def _notice_changes(self, now: RunningBackward) -> None:
        """Find what autograd has added to gradients that are not looked at: it is to be reduced.

        Gradients of one memory may have one version, and not all have changed: a mean of equal means is the same mean.
        """
        if list(map(_version, now.written.values())) == now.versions:
            return
        params = self._session.params
        changed = [
            name
            for (name, grad), version in zip(now.written.items(), now.versions, strict=True)
            if name not in now.aside and grad is params[name].grad and grad._version != version
        ]
        if not changed or any(param._post_accumulate_grad_hooks for param in params.values()):
            return  # such a hook may change gradients
        if any(self._parts.is_final(name, params[name]) for name in changed):
            self._known.update(dict.fromkeys(changed))
            raise CommFuseError(
                f"{_listed(changed)} got a gradient that does not come from the compiled module, for the first time "
                "after many backwards. It was added to a sum over the ranks, or to a mean that counts ranks without "
                "batches, which may not be reduced again: call zero_grad() and run the step again, which reduces it"
            )
        self._parts.was_local(changed)
        now.open.update(dict.fromkeys(changed))

    def _reduce(self, now: RunningBackward) -> None:
        left = {} if self._finds_unused else self._parts.local  # else such are counted, and have been reduced
        params = now.to_reduce(self._session.params, left)
        early = [name for name, param in params.items() if param._post_accumulate_grad_hooks]
        for name in early:
            del params[name]
        self._warn([name for name in now.open if name in params], early)
        if params:
            self._graphs.reduce_held(params, {})
        elif self._looks:
            self._uneven.agree_on_end()
        self._ends[self._uneven.roll is not None] += 1

    def _warn(self, names: Sequence[str], early: Sequence[str]) -> None:
        new, new_early = ([name for name in each if name not in self._known] for each in (names, early))
        self._known.update(dict.fromkeys((*new, *new_early)))
        if new:
            _RUNTIME.warning(
                "%s got a gradient that does not come from the compiled module: that of a penalty on parameters, say, "
                "of a loss that reads a parameter, or of a call of model.module. It is reduced at the end of the "
                "backward, where nothing hides it. To have it in a bucket, compute it inside of the model's forward",
                _listed(new),
            )
        if new_early:
            _RUNTIME.warning(
                "%s got a gradient that does not come from the compiled module, and has a hook of "
                "register_post_accumulate_grad_hook, which sees it before it can be reduced. It stays as it is on each "
                "rank. Compute it inside of the model's forward, or do the work of the hook after backward()",
                _listed(new_early),
            )


def _listed(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} other parameters" if len(names) > 1 else "")


class _Hook:
    """The hook of a parameter that runs before autograd adds to its gradient. param: None once it is removed."""

    def __init__(self, listener: weakref.ref[PastGradients], name: str, param: nn.Parameter) -> None:
        self.param: nn.Parameter | None = param
        self._listener = listener
        self._name = name
        with torch._C.DisableTorchFunctionSubclass():
            self._node: Any = get_gradient_edge(param).node  # nobody else keeps it between two backwards
        self._handle = self._node.register_prehook(self)

    def remove(self) -> None:
        """Listen no longer."""
        self._handle.remove()
        self._node = self.param = None

    @torch._disable_dynamo
    def __call__(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        listener, param = self._listener(), self.param
        if gradients[0] is not None and listener is not None and param is not None:
            listener.comes(self._name, param)


def _remove(hooks: Mapping[str, _Hook]) -> None:
    for hook in hooks.values():
        hook.remove()
