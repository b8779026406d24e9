"""When each collective of a running step was on the wire, and how long the step stood still for it.

Times are those of the host's clock, which is right for backends whose wait blocks the host (Gloo). A wait of NCCL
blocks a CUDA stream instead: measure/cuda_timeline.py asks the streams.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any


@dataclass
class Span:
    """A span is one collective of one measured step. Times are those of `time.perf_counter`, in seconds.

    name: of its start node.
    description: its kind, group, op, dtype, bytes and members.
    issued: when it was handed to the backend.
    wait_entered, wait_left: when the step began to wait for it, and went on.
    """

    name: str
    description: str
    issued: float
    done: float | None = None
    """When the backend reported the end; None when it has not, and then the end of the wait stands in."""
    wait_entered: float = 0.0
    wait_left: float = 0.0

    @property
    def end(self) -> float:
        """When it was done: what the backend reports, or the end of the wait where that is earlier."""
        # The report comes from the backend's thread and may be late; the wait knows better then.
        return self.wait_left if self.done is None else min(self.done, self.wait_left)

    @property
    def noticed(self) -> float:
        """When the step could go on with the result. A step that has waited is woken a little after the end."""
        return self.end if self.end <= self.wait_entered else self.wait_left

    @property
    def in_flight(self) -> float:
        """Seconds from its start until the step has noticed its end, time in the backend's queue included."""
        return max(self.noticed - self.issued, 0.0)

    @property
    def exposed(self) -> float:
        """Seconds that the step was blocked in the wait."""
        return self.wait_left - self.wait_entered


class Timeline:
    """A timeline is the measured communication of some steps. `CompiledStep.record_communication` makes it.

    steps: one list of spans per step, in the order of their waits.
    """

    def __init__(self) -> None:
        self.steps: list[list[Span]] = []
        self._open: dict[Any, Span] = {}

    @property
    def in_flight(self) -> float:
        """Seconds during which at least one collective was on the wire, over all steps."""
        return sum(_covered((span.issued, span.noticed) for span in step) for step in self.steps)

    @property
    def exposed(self) -> float:
        """Seconds that the steps were blocked in waits."""
        return sum(span.exposed for step in self.steps for span in step)

    @property
    def hidden(self) -> float:
        """The part of the communication time, 0..1, during which the step went on computing."""
        return max(0.0, 1.0 - self.exposed / self.in_flight) if self.in_flight else 0.0

    def text(self) -> str:
        """A report in plain lines; times are means over the steps."""
        count = len(self.steps)
        if not self.in_flight:
            return f"measured communication: none in {count} step(s)\n"
        scale = 1e3 / count
        lines = [f"measured communication, mean of {count} step(s)"]
        spans: dict[tuple[str, str], list[Span]] = {}
        for span in (span for step in self.steps for span in step):
            spans.setdefault((span.name, span.description), []).append(span)
        for (name, description), found in spans.items():
            flight, exposed = (sum(getattr(s, part) for s in found) * scale for part in ("in_flight", "exposed"))
            lines.append(f"  {name}: {flight:.3f} ms in flight, {exposed:.3f} ms exposed ({description})")
        lines.append(
            f"total: {self.in_flight * scale:.3f} ms in flight, {self.exposed * scale:.3f} ms exposed (blocked in "
            f"waits), {self.hidden:.0%} hidden behind compute"
        )
        return "\n".join(lines) + "\n"

    def begin_step(self) -> None:
        """Begin the list of another step."""
        self.steps.append([])

    def issued(self, key: Any, name: str, description: str, since: float, work: Any, on_device: bool = False) -> None:
        """A collective was handed to the backend at `since`; `work` is its handle.

        on_device: whether its tensors are on a device whose streams wait for it, and not the host.
        """
        span = self._open[key] = Span(name, description, since)

        def finished(_: Any) -> None:
            span.done = perf_counter()

        work.get_future().add_done_callback(finished)

    def wait(self, key: Any, work: Any) -> None:
        """Wait for a collective, and note how long that took."""
        span = self._open.pop(key, None)
        if span is None:
            work.wait()
            return
        span.wait_entered = perf_counter()
        work.wait()
        span.wait_left = perf_counter()
        self.steps[-1].append(span)

    def finish(self) -> None:
        """The steps are over, and their times are asked for."""


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
