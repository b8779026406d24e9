"""The tail of a step: updates that wait for collectives which are still on the wire when the call returns.

The following step runs the parts of the tail one by one, each just before the first node that needs it. If any thread
looks at a parameter earlier, or if the following step fails, the rest of the tail runs at once.

Why: docs/decisions.md, "With across_steps the updates are not atomic; without it they are".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import fx

from commfuse_fx.errors import CollectiveError
from commfuse_fx.runtime.execute.code.codegen import TailPart
from commfuse_fx.runtime.execute.interrupts import interrupts_deferred
from commfuse_fx.runtime.execute.streams import Streams
from commfuse_fx.runtime.memory.guard import Guard
from commfuse_fx.runtime.ranks.forks import check_process, process


class Tail:
    """The tail of one executor. Only the thread that holds the guard's lock runs it.

    devices: the numbers of the CUDA devices of its tensors. It runs on the streams of the step that left it, whatever
        stream reads a parameter or runs the following step.
    """

    def __init__(self, parts: Sequence[TailPart], guard: Guard, devices: Sequence[int]) -> None:
        self.parts = parts
        self.guard = guard
        self.devices = devices
        self._streams: Streams | None = None
        self._process = process()
        self._values: list[Any] | None = None
        self._next = 0
        self.lost: CollectiveError | None = None

    @property
    def failed(self) -> bool:
        return self.lost is not None

    @property
    def is_pending(self) -> bool:
        return self._values is not None

    def hooks(self) -> dict[fx.Node, Callable[[], None]]:
        """The function to call before a node of the following step, by node."""
        until: dict[fx.Node, int] = {}
        for number, part in enumerate(self.parts):
            until[part.before] = number + 1
        return {node: self._advancer(number) for node, number in until.items()}

    def begin(self, values: list[Any]) -> None:
        """Start the tail of a step that has ended, with the list of values that `produce` returned for it."""
        with self.guard.lock:
            assert self._values is None, "the tail of the step before has not run"
            self._streams = Streams(self.devices)
            self._values = values
            self._next = 0

    def check(self) -> None:
        """Raises CollectiveError if an earlier run of the tail has failed, so that updates are missing."""
        if self.lost is not None:
            raise CollectiveError(str(self.lost)) from self.lost.__cause__

    def finish(self) -> None:
        """Run the rest of the tail. Raises CollectiveError if its communication fails."""
        self.advance(len(self.parts))

    def advance(self, until: int) -> None:
        """Run the parts before number `until` that have not run yet."""
        with self.guard.lock:
            if self._values is not None:
                check_process(
                    self._process,
                    "the updates of its last step (across_steps=True) were still to come: only the parent can finish "
                    "them, so call step.synchronize() there before it forks",
                )
                assert self._streams is not None
                with self._streams.current():
                    self._run(self._values, until)

    def _run(self, values: list[Any], until: int) -> None:
        try:
            while self._next < until:
                part = self.parts[self._next]
                with nullcontext() if part.waits else interrupts_deferred():
                    part.run(values)
                    self._next += 1
        except CollectiveError as error:
            done, all_of_them = (sum(not part.waits for part in self.parts[:end]) for end in (self._next, None))
            self.lost = CollectiveError(
                f"{error} This was the rest of the previous step (across_steps=True): of its updates, "
                f"{done} of {all_of_them} parts are in the parameters, the others are not. Start all ranks again "
                "from a checkpoint."
            )
            raise self.lost from error
        finally:
            if self.failed or self._next == len(self.parts):
                self._values = None

    def _advancer(self, until: int) -> Callable[[], None]:
        return lambda: self.advance(until)
