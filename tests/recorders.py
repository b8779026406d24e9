"""A recorder for tests on CPU: what a CUDA graph would repeat on its own runs as Python again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

import commfuse_fx as cf


class CpuRecorder:
    """As a CUDA graph, its recordings read fixed inputs and write fixed outputs, and recording runs nothing.

    recordings: all that were made. error: what recording raises.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.recordings: list[CpuRecording] = []
        self.error: Exception | None = None
        self.is_busy = False

    def record(self, compute: Callable[[], Sequence[Any]], generators: Iterable[torch.Generator]) -> CpuRecording:
        if self.error is not None:
            raise self.error
        self.recordings.append(CpuRecording(compute))
        return self.recordings[-1]

    def is_recording(self) -> bool:
        return self.is_busy

    def mark(self) -> Callable[[], bool]:
        return lambda: True

    @property
    def replays(self) -> list[int]:
        """How often each recording has run."""
        return [recording.replays for recording in self.recordings]


class CpuRecording:
    def __init__(self, compute: Callable[[], Sequence[Any]]) -> None:
        self.outputs: Sequence[Any] = ()
        self.replays = 0
        self.is_closed = False
        self._compute = compute

    def replay(self) -> None:
        assert not self.is_closed
        self.replays += 1
        made = self._compute()
        if not self.outputs:
            self.outputs = [each.clone() for each in made]
        for fixed, value in zip(self.outputs, made, strict=True):
            fixed.copy_(value)

    def close(self) -> None:
        self.is_closed = True
        self.outputs = ()


def recorded(step: cf.CompiledStep) -> CpuRecorder:
    """Let a step on CPU run as one on CUDA would: captured by the recorder that is returned."""
    recorder = CpuRecorder()
    step.session.capture_with(recorder)
    return recorder
