"""The timeline of a model on CUDA, where a wait blocks a stream and not the host.

Why: docs/decisions.md, "A step on CUDA does not let the host wait".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from commfuse_fx.machine.timeline import Span, Timeline


@dataclass
class _Marks:
    """The events of a span. done: of a stream that waits for the collective and does nothing else."""

    span: Span
    issued: Any
    done: Any = None
    entered: Any = None
    left: Any = None


class CudaTimeline(Timeline):
    """A CUDA timeline takes the times of its spans from events on the streams of one device.

    They are known when `finish` has been called, in seconds of `time.perf_counter`, as those of votes are.
    """

    def __init__(self, device: torch.device, event: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._device = device
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))
        self._flying: dict[Any, _Marks] = {}
        self._marks: list[_Marks] = []
        self._origin = self._recorded()
        self._synchronize()
        self._began = perf_counter()

    def issued(self, key: Any, name: str, description: str, since: float, work: Any, on_device: bool = False) -> None:
        if not on_device:
            super().issued(key, name, description, since, work)
            return
        marks = self._flying[key] = _Marks(Span(name, description, since), self._recorded())

        def finished(_: Any) -> None:
            # PyTorch makes a stream that waits for the collective the current one here.
            marks.done = self._recorded()

        work.get_future().add_done_callback(finished)

    def wait(self, key: Any, work: Any) -> None:
        marks = self._flying.pop(key, None)
        if marks is None:
            super().wait(key, work)
            return
        marks.entered = self._recorded()
        work.wait()
        marks.left = self._recorded()
        self._marks.append(marks)
        self.steps[-1].append(marks.span)

    def finish(self) -> None:
        self._synchronize()
        for marks in self._marks:
            span = marks.span
            span.issued = self._at(marks.issued)
            span.done = None if marks.done is None else self._at(marks.done)
            span.wait_entered, span.wait_left = self._at(marks.entered), self._at(marks.left)
        self._marks.clear()

    def _recorded(self) -> Any:
        event = self._event()
        if self._device.type == "cuda":
            event.record(torch.cuda.current_stream(self._device))
        else:
            event.record()
        return event

    def _at(self, event: Any) -> float:
        return self._began + float(self._origin.elapsed_time(event)) / 1e3

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
