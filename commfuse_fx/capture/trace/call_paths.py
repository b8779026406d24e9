"""Call paths say where in the Python program each traced op was called, and in which loops.

Why: docs/decisions.md, "The order of a set decides nothing".
"""

from __future__ import annotations

import dis
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

_TRACE = os.path.join(os.path.dirname(__file__), "trace.py")
_DISPATCH = ("__torch_function__", "__torch_dispatch__")


class Frame(NamedTuple):
    """One Python frame on the call path of an op.

    activation: a number for the frame. code: its code object. at: the offset of its current instruction.
    """

    activation: int
    code: CodeType
    at: int


Path = tuple[Frame, ...]
"""The frames from the traced function down to an op. Ops of one activation have the same frame numbers."""


@dataclass(frozen=True)
class Dispatch:
    """One op that was dispatched during a trace.

    path: the call path of a forward op; empty for a backward op.
    run: for a backward op the number of its run. One autograd node called all ops of a run, one after another.
    sequence: autograd's number of the node that called a backward op, which is also the number of a forward op. None
        if autograd itself added up gradients.
    """

    path: Path = ()
    run: int = -1
    sequence: int | None = None


class CallPaths:
    """Numbers the ops of a trace in the order of their calls, and remembers an event for each."""

    def __init__(self) -> None:
        self.events: list[Dispatch] = []
        self.by_sequence: dict[int, list[int]] = {}
        """Autograd's sequence number -> the forward ops that were dispatched while it was the current number. One of
        them made the autograd node. Ops before it left nothing in the graph, and ops after it made no node."""
        self._frames: list[FrameType] = []  # held, so that no other frame gets the identity of one of these
        self._calls: list[Frame] = []
        self._made = 0
        self._run: tuple[int, str] | None = None
        self._runs = 0

    def forward(self, frame: FrameType | None, sequence: int) -> int:
        """Note a forward op that this frame has called; returns its event number.

        sequence: autograd's number of the node that the op may have made.
        """
        self.events.append(Dispatch(self._path(frame)))
        number = len(self.events) - 1
        self.by_sequence.setdefault(sequence, []).append(number)
        return number

    def backward(self, sequence: int | None, name: str) -> int:
        """Note a backward op; returns its event number.

        sequence, name: the autograd node that called it. sequence is None if autograd itself called it.
        """
        key = None if sequence is None else (sequence, name)
        if key is None or key != self._run:
            self._runs += 1
        self._run = key
        self.events.append(Dispatch((), self._runs, sequence))
        return len(self.events) - 1

    def release(self) -> None:
        """Drop the Python frames."""
        self._frames, self._calls = [], []

    def _path(self, frame: FrameType | None) -> Path:
        frames: list[FrameType] = []
        while frame is not None:
            code = frame.f_code
            if code.co_name in _DISPATCH:
                frames = []  # a function of torch is one call, whatever it calls
            frames.append(frame)
            if code.co_filename == _TRACE:
                break
            frame = frame.f_back
        frames.reverse()
        same = 0
        for one, other in zip(frames, self._frames, strict=False):
            if one is not other:
                break
            same += 1
        calls = self._calls[:same]
        for i, (call, frame) in enumerate(zip(calls, frames, strict=False)):
            if call.at != frame.f_lasti:
                calls[i] = call._replace(at=frame.f_lasti)
        for frame in frames[same:]:
            calls.append(Frame(self._made, frame.f_code, frame.f_lasti))
            self._made += 1
        self._frames, self._calls = frames, calls
        return tuple(calls)


@cache
def _loops(code: CodeType) -> tuple[tuple[int, int], ...]:
    """The offsets of the first and the last instruction of each loop."""
    ends: dict[int, int] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            target = int(instruction.argval)
            if target <= instruction.offset:
                ends[target] = max(ends.get(target, 0), instruction.offset)
    return tuple(sorted(ends.items()))


def loop_inside(code: CodeType, within: tuple[int, int] | None, at: int) -> tuple[int, int] | None:
    """The outermost loop around instruction `at` that lies inside the loop `within` (None: anywhere in the code)."""
    found = [
        loop
        for loop in _loops(code)
        if loop[0] <= at <= loop[1]
        and (within is None or (loop != within and within[0] <= loop[0] and loop[1] <= within[1]))
    ]
    return max(found, key=lambda loop: loop[1] - loop[0], default=None)


def neighbours(events: list[int], kind: Callable[[int], Any]) -> list[tuple[Any, list[int]]]:
    """Cut events into runs of neighbours for which `kind(event)` is equal; returns pairs of the kind and the run."""
    found: list[tuple[Any, list[int]]] = []
    for number in events:
        now = kind(number)
        if not found or found[-1][0] != now:
            found.append((now, []))
        found[-1][1].append(number)
    return found
