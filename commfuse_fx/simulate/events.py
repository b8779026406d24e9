"""What a simulated step consists of: events of compute, and collectives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """An event is what one stream does from `begin` to `end`.

    name: of the node; a piece of a collective has a number behind it.
    kind: "compute", "issue" (a transfer is handed over), "communication" or "wait".
    stream: "compute", or the group of a collective.
    begin, end: seconds since the step began.
    node: its name in the graph; for a piece, that of the collective's start.
    phase: "forward", "backward" or "update".
    issued: when a transfer was handed to its stream; None for other kinds. Below 0 for one that the step before
        has issued.
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
    """A collective as simulated. Times are seconds since the step began.

    name: of its start node.
    issued: when its first piece was handed to its stream.
    begin: when the first piece went onto the wire.
    end: when the last piece had arrived.
    wait_entered, wait_left: when the step began to wait for it, and went on.
    seconds: on the wire, all pieces together.
    hidden: the time from issued to end that is not exposed.
    exposed: how long the step stood still in the wait.
    reason: why it is exposed; "" where it is not.
    description: its kind, group, op, dtype, bytes and members.
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
