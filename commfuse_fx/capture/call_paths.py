"""Where in the running program each traced op was called: the calls on the way to it, and the loops around these."""

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
    """One frame on the way to an op: which activation of which code, and the instruction that it is at."""

    activation: int
    code: CodeType
    at: int


Path = tuple[Frame, ...]
"""From the function that is traced inwards. Paths share activations as far as the program has not returned."""


@dataclass(frozen=True)
class Dispatch:
    """One op that was dispatched. A forward op has a path.

    A backward op has the sequence number of the autograd node that called it, which is that of a forward op, or None
    where autograd adds up gradients by itself; ops of one `run` were called one after another by one autograd node.
    """

    path: Path = ()
    run: int = -1
    sequence: int | None = None


class CallPaths:
    """Numbers the ops of a trace in the order of their calls, and remembers an event for each."""

    def __init__(self) -> None:
        self.events: list[Dispatch] = []
        self.by_sequence: dict[int, list[int]] = {}
        """Autograd's sequence number -> the forward op that made the node, after ops that helped to make it and left
        nothing in the graph, and before those that made no node and found this number taken."""
        self._frames: list[FrameType] = []  # held, so that no other frame gets the identity of one of these
        self._calls: list[Frame] = []
        self._made = 0
        self._run: tuple[int, str] | None = None
        self._runs = 0

    def forward(self, frame: FrameType | None, sequence: int) -> int:
        """An op that this frame has called. `sequence`: autograd's number of the node that it may have made."""
        self.events.append(Dispatch(self._path(frame)))
        number = len(self.events) - 1
        self.by_sequence.setdefault(sequence, []).append(number)
        return number

    def backward(self, sequence: int | None, name: str) -> int:
        """An op that the autograd node of this name and number has called, or autograd itself."""
        key = None if sequence is None else (sequence, name)
        if key is None or key != self._run:
            self._runs += 1
        self._run = key
        self.events.append(Dispatch((), self._runs, sequence))
        return len(self.events) - 1

    def release(self) -> None:
        """Let go of the program's frames."""
        self._frames, self._calls = [], []

    def _path(self, frame: FrameType | None) -> Path:
        frames: list[FrameType] = []
        while frame is not None:
            code = frame.f_code
            if code.co_name in _DISPATCH:
                frames = []  # what one function of torch does is one call
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
    """First and last instruction of each loop."""
    ends: dict[int, int] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            target = int(instruction.argval)
            if target <= instruction.offset:
                ends[target] = max(ends.get(target, 0), instruction.offset)
    return tuple(sorted(ends.items()))


def loop_inside(code: CodeType, within: tuple[int, int] | None, at: int) -> tuple[int, int] | None:
    """The outermost loop, of those inside of another one, that this instruction belongs to."""
    found = [
        loop
        for loop in _loops(code)
        if loop[0] <= at <= loop[1]
        and (within is None or (loop != within and within[0] <= loop[0] and loop[1] <= within[1]))
    ]
    return max(found, key=lambda loop: loop[1] - loop[0], default=None)


def neighbours(events: list[int], kind: Callable[[int], Any]) -> list[tuple[Any, list[int]]]:
    """Runs of events of one kind, which is what `kind(event)` gives."""
    found: list[tuple[Any, list[int]]] = []
    for number in events:
        now = kind(number)
        if not found or found[-1][0] != now:
            found.append((now, []))
        found[-1][1].append(number)
    return found
