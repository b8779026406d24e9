"""When a step is captured in a CUDA graph, when it runs from one, and why it stops doing so.

Why: docs/decisions.md, "Ranks vote before they launch a captured step, and again after they capture one".
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import sleep
from typing import Any

import torch

from commfuse_fx.errors import NotAvailableError
from commfuse_fx.ir.ops.deferred import is_deferred
from commfuse_fx.runtime.execute.cuda_graphs.capturable import obstacle
from commfuse_fx.runtime.execute.cuda_graphs.captured_step import CapturedStep
from commfuse_fx.runtime.execute.cuda_graphs.cuda_graph import Recorder
from commfuse_fx.runtime.execute.cuda_graphs.launch_watch import LaunchWatch
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.support.logs import logger

log = logger("cuda_graphs")

PAUSE = 0.0005
"""Seconds between two looks at the device."""

PLAIN, CAPTURE, REPLAY = range(3)
"""What a rank wishes to do with a step: run it without a graph, capture it first, or run what it has captured. Ranks
do together what the most modest of them wishes."""

MOST = 8
"""Captured steps that are kept; the one that has not run for longest goes first."""

FIRST = 3
"""Steps of one shape before "auto" captures it. A capture that hardly paid makes the next one wait twice as long."""

PAYS = 64
"""Steps after which a capture has paid."""

IN_A_ROW = 3
"""So many captures in a row, each for one step since hyper-parameters changed, end the captures of "auto"."""


@dataclass(eq=False)
class _Shape:
    """What is known of one executor. steps: those without a capture since it had one; needed: as `FIRST`."""

    needed: int
    steps: int = 0
    captured: CapturedStep | None = None


class StepGraphs:
    """The captured steps of one compiled step on one rank.

    recorder: makes the recordings.
    always: whether the user asks for graphs (True), or leaves it to the compiler ("auto").
    watch: looks after repetitions that communicate. None: none of them does.
    first: as `FIRST`.
    ended: why no step is captured any more; "" as long as steps are.
    votes, vote_seconds: how often the ranks have voted before a launch, and what that took this rank's host.
    """

    def __init__(self, recorder: Recorder, always: bool, watch: LaunchWatch | None = None) -> None:
        self.recorder = recorder
        self.watch = watch
        self.ended = ""
        self.first = FIRST
        self.votes = 0
        self.vote_seconds = 0.0
        self._always = always
        self._paused = False
        self._in_a_row = 0
        self._is_done: Callable[[], bool] = lambda: True  # of the last launch, on whatever stream that was
        self._shapes: weakref.WeakKeyDictionary[Executor, _Shape] = weakref.WeakKeyDictionary()
        self._captured: dict[_Shape, weakref.ref[Executor]] = {}  # that of the last step is the last one

    @property
    def is_lost(self) -> bool:
        """Whether communication of a captured step was given up."""
        return self.watch is not None and bool(self.watch.lost)

    def check(self) -> None:
        """Raises CollectiveError if communication of a captured step was given up."""
        if self.watch is not None:
            self.watch.check()

    def admit(self, executor: Executor) -> None:
        """Take up an executor before its first run, if its program can be captured.

        Raises NotAvailableError if it cannot, and the user asks for graphs.
        """
        for shape, known in list(self._captured.items()):
            other = known()
            if other is None or other.params is not executor.params:
                self._drop(shape, "its program has gone" if other is None else "a parameter of the model was replaced")
        program, device = executor.program, self.recorder.device
        if not program.training:
            return
        elsewhere = next((param.device for param in executor.params.values() if param.device != device), None)
        why = obstacle(program, device.type) if elsewhere is None else f"a parameter is on {elsewhere}, not on {device}"
        if not why and not self._always and any(map(is_deferred, program.graph.nodes)):
            why = "with across_steps=True communication goes on while the next step runs, and in a graph it would not"
        if why and self._always:
            raise NotAvailableError(
                f'cuda_graph=True: {why}; pass cuda_graph="auto", which runs such a step without a graph'
            )
        if why:
            log.info("a step runs without a CUDA graph: %s", why)
            return
        executor.rates.follows = True
        self._shapes[executor] = _Shape(self.first)

    def wish(self, executor: Executor) -> int:
        """What to do with a step of this executor: PLAIN, CAPTURE or REPLAY. Call it once before each step."""
        shape = self._shapes.get(executor)
        if shape is None or self.ended or self._paused or not executor.has_run:
            return PLAIN
        if self.recorder.is_recording() or torch._C._len_torch_dispatch_stack():
            return PLAIN  # somebody wants to see each op
        if shape.captured is not None and (change := shape.captured.change(executor)) is not None:
            was_quick = change.is_number and shape.captured.replays <= 1
            self._drop(shape, change.text)
            self._in_a_row = self._in_a_row + 1 if was_quick else 0
            if self._in_a_row == IN_A_ROW and not self._always:
                self.end(f"{IN_A_ROW} captures in a row have served one step each: {change.text}")
                return PLAIN
        if shape.captured is not None:
            return REPLAY
        shape.steps += 1
        if self._always:
            return CAPTURE
        if shape.steps < shape.needed:
            return PLAIN
        if not self.recorder.has_room():
            log.info("a step runs without a CUDA graph: it would keep so much memory that other steps may lack it")
            shape.needed, shape.steps = 2 * shape.needed, 0
            return PLAIN
        return CAPTURE

    def capture(self, executor: Executor) -> bool:
        """Capture a step, and run nothing but what the step before has left to do. Returns whether `replay` can run it.

        If that fails, "auto" captures no step any more. Raises NotAvailableError if the user asks for graphs.
        """
        shape = self._shapes[executor]
        executor.synchronize()
        if shape.captured is not None:
            self._drop(shape, "another rank captures it")
        if len(self._captured) == MOST:
            self._drop(next(iter(self._captured)), f"{MOST} others have run since")
        try:
            shape.captured = CapturedStep(executor, self.recorder)
        except Exception as error:
            if self._always:
                raise NotAvailableError(
                    f'cuda_graph=True: capturing the step failed; pass cuda_graph="auto", which runs it without a '
                    f"graph [{_cause(error)}]"
                ) from error
            self.end(f"capturing one failed [{_cause(error)}]")
            return False
        self._captured[shape] = weakref.ref(executor)
        log.info("captured a step; its inputs: %s", shape.captured)
        return True

    def replay(self, executor: Executor, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """Run a captured step. Returns what `Executor.run` returns."""
        shape = self._shapes[executor]
        assert shape.captured is not None, "a captured step"
        self._captured[shape] = self._captured.pop(shape)
        executor.synchronize()  # a step without a graph may have come between
        outputs = shape.captured.run(executor, inputs)
        self._is_done = self.recorder.mark()
        if self.watch is not None and executor.has_collectives:
            self.watch.launched(self._is_done)
        return outputs

    def end(self, why: str) -> None:
        """Capture no step any more, and free those that were."""
        if not self.ended:
            self.ended = why
            log.warning("steps run without CUDA graphs from here on: %s", why)
        self._drop_all(why)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside of the block no step is captured or run from a capture."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def close(self) -> None:
        """Free all captured steps, when the device has finished with them. No step is captured any more."""
        if self.votes:
            microseconds = self.vote_seconds / self.votes * 1e6
            log.info("a vote before a launch took the host %.0f us (mean of %d)", microseconds, self.votes)
        self.ended = self.ended or "closed"
        self._drop_all(self.ended)
        if self.watch is not None:
            self.watch.close()

    def _drop_all(self, why: str) -> None:
        for shape in list(self._captured):
            self._drop(shape, why)

    def _drop(self, shape: _Shape, why: str) -> None:
        captured = shape.captured
        assert captured is not None, "a captured step"
        log.info("a captured step goes: %s", why)
        del self._captured[shape]
        shape.needed = self.first if captured.replays >= PAYS else 2 * shape.needed
        shape.steps, shape.captured = 0, None
        self._finish()
        captured.close()

    def _finish(self) -> None:
        """Wait until the device has finished the last launch, or the watch has given it up."""
        while not self._is_done() and not self.is_lost:
            sleep(PAUSE)


def _cause(error: BaseException) -> str:
    """The error that came first: the end of a failed capture raises another one."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}"
