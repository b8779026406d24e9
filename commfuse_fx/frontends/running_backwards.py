"""The backwards of one model that run now: activation checkpointing may run another one inside of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

_MOST = 8  # backwards that run inside of each other, or have failed


@dataclass
class RunningBackward:
    """A backward, and what has become of gradients and buffers in it.

    may_run_again: whether its graph is kept. is_outermost: whether no other one runs around it.
    has_gradients: whether it has come to a parameter.
    open: parameters whose gradients are not reduced.
    settled: gradients that graphs have reduced, or not reached, with their versions.
    sent: buffers that graphs have sent.
    aside: what gradients of this rank may not be added to.
    """

    may_run_again: bool
    is_outermost: bool
    has_gradients: bool = False
    open: dict[str, None] = field(default_factory=dict)
    settled: dict[str, tuple[torch.Tensor | None, int]] = field(default_factory=dict)
    sent: dict[str, None] = field(default_factory=dict)
    aside: dict[str, torch.Tensor] = field(default_factory=dict)

    def put_aside(self, name: str, total: torch.Tensor) -> None:
        """Take what is final out of the way. The tensor is kept, and may be added to."""
        if name in self.aside:
            self.aside[name].add_(total)
        else:
            self.aside[name] = total

    def take_over(self, inner: RunningBackward) -> None:
        """One that has run inside of this one has ended: what it leaves is done at the end of this one."""
        self.has_gradients = self.has_gradients or inner.has_gradients
        self.open.update(inner.open)
        self.sent.update(inner.sent)
        for name, total in inner.aside.items():
            self.put_aside(name, total)


class RunningBackwards:
    """Knows the backward that runs now, and the outermost one."""

    def __init__(self) -> None:
        self._by_task: dict[int, RunningBackward] = {}

    def forget(self) -> None:
        """A forward begins outside of any backward: those that have not ended have failed."""
        for failed in self._by_task.values():
            failed.is_outermost = False

    def follow(self, outputs: Iterable[torch.Tensor], on_end: Callable[[RunningBackward], None]) -> None:
        """The outermost backward begins at these outputs of the model."""

        def begun(gradients: Any) -> None:
            self.now(on_end)

        for node in dict.fromkeys(output.grad_fn for output in outputs if output.grad_fn is not None):
            node.register_prehook(begun)

    def now(self, on_end: Callable[[RunningBackward], None]) -> RunningBackward:
        """The backward that runs now. on_end: is called when the outermost one has ended."""
        task = torch._C._current_graph_task_id()
        if task not in self._by_task:
            if len(self._by_task) >= _MOST:
                self._by_task.pop(next(iter(self._by_task)))
            may_run_again = bool(torch._C._autograd._get_current_graph_task_keep_graph())
            self._by_task[task] = RunningBackward(may_run_again, self._outermost is None)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task, on_end))
        return self._by_task[task]

    @property
    def _outermost(self) -> RunningBackward | None:
        return next((each for each in self._by_task.values() if each.is_outermost), None)

    def _end(self, task: int, on_end: Callable[[RunningBackward], None]) -> None:
        ended = self._by_task.pop(task)
        outer = self._outermost
        if outer is None:
            on_end(ended)
        else:
            outer.take_over(ended)
