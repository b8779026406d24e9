"""The backwards of one model that run now: activation checkpointing may run another one inside of one.

Why: docs/decisions.md, "What no graph has reduced is reduced at the end of the backward".
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

LOOKED_AT = 16
"""How many of the first backwards are looked at, in which a mistake of the program shows: looking takes time."""


@dataclass
class RunningBackward:
    """A backward, and what has become of gradients and buffers in it.

    may_run_again: whether its graph is kept. is_outermost: whether no other one runs around it.
    has_gradients: whether it has come to a parameter.
    open: parameters whose gradients are not reduced.
    settled: gradients that graphs have reduced, or not reached, with their versions.
    sent: buffers that graphs have sent.
    aside: what gradients of this rank may not be added to.
    written: names of parameters, and their gradients, which a compiled backward has reduced. versions: of these.
    """

    may_run_again: bool
    is_outermost: bool
    has_gradients: bool = False
    open: dict[str, None] = field(default_factory=dict)
    settled: dict[str, tuple[torch.Tensor | None, int]] = field(default_factory=dict)
    sent: dict[str, None] = field(default_factory=dict)
    aside: dict[str, torch.Tensor] = field(default_factory=dict)
    written: dict[str, torch.Tensor] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)

    def put_aside(self, name: str, total: torch.Tensor) -> None:
        """Take what is final out of the way. The tensor is kept, and may be added to."""
        if name in self.aside:
            self.aside[name].add_(total)
        else:
            self.aside[name] = total

    def put_back(self, params: Mapping[str, nn.Parameter]) -> None:
        """Add what has been put aside to `.grad` again."""
        with torch.no_grad():
            for name, total in self.aside.items():
                grad = params[name].grad
                params[name].grad = total if grad is None else total.add_(grad)

    def to_reduce(self, params: Mapping[str, nn.Parameter], local: Mapping[str, None]) -> dict[str, nn.Parameter]:
        """Of these parameters those that this backward, or one before that did not reduce, has left.

        local: names of parameters whose `.grad` holds what has not been reduced.
        """
        return {
            name: param
            for name, param in params.items()
            if name in self.open or (name in local and param.grad is not None)
        }

    def take_over(self, inner: RunningBackward) -> None:
        """One that has run inside of this one has ended: what it leaves is done at the end of this one."""
        self.has_gradients = self.has_gradients or inner.has_gradients
        self.open.update(inner.open)
        self.sent.update(inner.sent)
        self.written.update(inner.written)
        self.versions = [grad._version for grad in self.written.values()]
        for name, total in inner.aside.items():
            self.put_aside(name, total)


OnEnd = Callable[[RunningBackward], None]


class _End:
    """What autograd calls at the end of one backward. It lives as long as that."""

    def __init__(self, backwards: RunningBackwards, task: int, on_end: OnEnd) -> None:
        self._backwards = backwards
        self._task = task
        self._on_end = on_end

    @torch._disable_dynamo
    def __call__(self) -> None:
        self._backwards.ended(self._task, self._on_end)


class RunningBackwards:
    """Knows the backward that runs now, and the outermost one."""

    def __init__(self) -> None:
        self._by_task: dict[int, tuple[RunningBackward, weakref.ref[_End]]] = {}

    def follow(self, outputs: Iterable[torch.Tensor], on_end: OnEnd) -> None:
        """The outermost backward begins at these outputs of the model."""

        @torch._disable_dynamo
        def begun(gradients: Any) -> None:
            self.now(on_end)

        for node in dict.fromkeys(output.grad_fn for output in outputs if output.grad_fn is not None):
            node.register_prehook(begun)

    def now(self, on_end: OnEnd) -> RunningBackward:
        """The backward that runs now. on_end: is called when the outermost one has ended."""
        task = torch._C._current_graph_task_id()
        if task not in self._by_task:
            may_run_again = bool(torch._C._autograd._get_current_graph_task_keep_graph())
            found, end = RunningBackward(may_run_again, self._outermost() is None), _End(self, task, on_end)
            self._by_task[task] = found, weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)
        return self._by_task[task][0]

    def _outermost(self) -> RunningBackward | None:
        # Autograd lets go of the end of a backward that has failed.
        self._by_task = {task: each for task, each in self._by_task.items() if each[1]() is not None}
        return next((running for running, _ in self._by_task.values() if running.is_outermost), None)

    def ended(self, task: int, on_end: OnEnd) -> None:
        """A backward has come to its end."""
        running, _ = self._by_task.pop(task)
        outer = self._outermost()
        if outer is None:
            on_end(running)
        else:
            outer.take_over(running)
