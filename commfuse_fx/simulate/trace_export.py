"""A simulated step in the Trace Event Format (JSON), which Perfetto and chrome://tracing open.

One process; the compute stream is its first thread, each group's stream one more. Arrows lead from where a transfer
is issued over its time on the wire to the wait for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from commfuse_fx.simulate.events import Event, SimulatedCollective

_PROCESS = 0
_COMPUTE = 0


def chrome_trace(events: Sequence[Event], collectives: Sequence[SimulatedCollective]) -> str:
    """JSON text with "traceEvents"; times in microseconds, the earliest is 0."""
    streams = dict.fromkeys(event.stream for event in events if event.kind == "communication")
    lanes = {stream: number for number, stream in enumerate(streams, _COMPUTE + 1)}
    times = [event.begin if event.issued is None else event.issued for event in events]
    zero = min(times, default=0.0)
    waited = {each.name: each for each in collectives}
    handed_over = {(event.name, event.end): event.begin for event in events if event.kind == "issue"}
    found = [_lane_name("process_name", _COMPUTE, "training step"), _lane_name("thread_name", _COMPUTE, "compute")]
    found.extend(_lane_name("thread_name", lane, f"communication on {stream}") for stream, lane in lanes.items())
    for serial, event in enumerate(events):
        lane = lanes[event.stream] if event.kind == "communication" else _COMPUTE
        arguments = {"node": event.node, "phase": event.phase}
        each = waited.get(event.node)
        if each is not None:
            arguments.update(description=each.description, reason=each.reason)
        if each is not None and event.issued is not None:
            name = f"issue {event.name}"
            begin = handed_over.get((name, event.issued))
            if begin is None:  # in no time, or before the step began
                begin = event.issued
                found.append(_slice(name, "issue", _COMPUTE, begin - zero, 0.0, arguments))
            found.append(_arrow("s", serial, _COMPUTE, begin - zero))
            found.append(_arrow("t", serial, lane, event.begin - zero))
            found.append(_arrow("f", serial, _COMPUTE, each.wait_entered - zero))
        found.append(_slice(event.name, event.kind, lane, event.begin - zero, event.end - event.begin, arguments))
    return json.dumps({"traceEvents": found, "displayTimeUnit": "ms"})


def _lane_name(kind: str, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": lane, "args": {"name": name}}


def _slice(name: str, kind: str, lane: int, begin: float, seconds: float, args: dict[str, str]) -> dict[str, Any]:
    times = {"ts": begin * 1e6, "dur": seconds * 1e6}
    return {"ph": "X", "name": name, "cat": kind, "pid": _PROCESS, "tid": lane, **times, "args": args}


def _arrow(phase: str, serial: int, lane: int, at: float) -> dict[str, Any]:
    arrow = {"ph": phase, "name": "collective", "cat": "flow", "id": serial, "pid": _PROCESS, "tid": lane}
    return {**arrow, "ts": at * 1e6, **({"bp": "e"} if phase == "f" else {})}
