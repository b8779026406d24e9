"""The timeline of the report: what ran when, as plain lanes of spans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from commfuse_fx.machine.timeline import Span, Timeline
from commfuse_fx.simulate.simulation import Simulation

_COMPUTE = "compute"

_DIGITS = 12
"""Of seconds: a picosecond is less than any cost model knows."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One span of a lane: seconds since the step began.

    kind: "compute" | "wait" | "issue" (the host hands a transfer over) | "communication". node: position in the graph,
    -1 for what is no node of it. waits: seconds at which the step entered and left the wait for it; None for what
    nobody waits for.
    """

    label: str
    kind: str
    begin: float
    end: float
    node: int
    waits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Lane:
    """What one stream did, in the order of time. Bars of a measured lane may overlap."""

    title: str
    bars: tuple[Bar, ...]


def seconds(value: float) -> float:
    """A time as it is written: rounded to picoseconds, so that no noise of the last bit is in the file."""
    return round(value, _DIGITS) + 0.0


def predicted_lanes(simulation: Simulation, position: Mapping[str, int]) -> tuple[Lane, ...]:
    """Compute first, then one lane for each group of mesh axes. position: of nodes in the graph, by name."""
    waits = {each.name: (seconds(each.wait_entered), seconds(each.wait_left)) for each in simulation.collectives}
    lanes: dict[str, list[Bar]] = {_COMPUTE: []}
    for event in simulation.events:
        travels = event.kind == "communication"
        window = waits[event.node] if travels else None
        bar = Bar(event.name, event.kind, seconds(event.begin), seconds(event.end), position[event.node], window)
        lanes.setdefault(f"group {event.stream}" if travels else _COMPUTE, []).append(bar)
    return tuple(Lane(title, _in_time(bars)) for title, bars in lanes.items())


def measured_lanes(timeline: Timeline, position: Mapping[str, int], first_issue: float) -> tuple[Lane, ...]:
    """One lane for each recorded step that had collectives. Its first issue is put at `first_issue`, as the recorder
    does not know when the step began."""
    lanes = []
    for number, step in enumerate(timeline.steps):
        if step:
            shift = first_issue - min(span.issued for span in step)
            lanes.append(Lane(f"measured step {number}", _in_time(_bar(span, position, shift) for span in step)))
    return tuple(lanes)


def _in_time(bars: Iterable[Bar]) -> tuple[Bar, ...]:
    return tuple(sorted(bars, key=lambda bar: (bar.begin, bar.end)))


def _bar(span: Span, position: Mapping[str, int], shift: float) -> Bar:
    waits = (seconds(span.wait_entered + shift), seconds(span.wait_left + shift))
    begin, end = seconds(span.issued + shift), seconds(span.end + shift)
    # A piece of a collective has the name of its start and a number.
    start, _, number = span.name.rpartition(".")
    node = position.get(span.name, position.get(start, -1) if number.isdecimal() else -1)
    return Bar(span.name, "communication", begin, end, node, waits)
