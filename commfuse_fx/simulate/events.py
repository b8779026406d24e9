"""What a simulated step consists of: events of compute, and collectives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """What one stream did from `begin` to `end`: seconds since the step began.

    kind: "compute" | "issue" | "communication" | "wait". stream: "compute", or the group of a collective; on
    "compute", "issue" is handing a transfer over, where that takes time. node: its name in the graph; that of the start
    for a piece of a collective, whose own `name` carries a number. issued: when a transfer was handed to its stream
    (None for other kinds). Where nodes run in the following step, a transfer may have been issued before the step
    began, at a time below 0.
    """

    name: str
    kind: str
    stream: str
    begin: float
    end: float
    node: str
    phase: str
    issued: float | None = None


@dataclass(frozen=True, slots=True)
class SimulatedCollective:
    """One collective; times in seconds since the step began.

    issued: when its first piece was handed to its stream. begin, end: when the first piece went onto the wire and
    the last one had arrived. seconds: on the wire, all pieces together. exposed: the step stood still in the wait.
    hidden: the rest of the time from issued to end. reason: why it is exposed, "" where it is not.
    """

    name: str
    issued: float
    begin: float
    end: float
    wait_entered: float
    wait_left: float
    seconds: float
    hidden: float
    exposed: float
    reason: str
    description: str
