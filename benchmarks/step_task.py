"""What `step_time` and its ranks tell each other, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from benchmarks.chart import Span

UNLIMITED = "unlimited"


def label(rate: float | None) -> str:
    """Gbit/s as text."""
    return UNLIMITED if rate is None else f"{rate:g}"


@dataclass(frozen=True)
class Task:
    """One workload at several rates (Gbit/s, None for no limit), as one rank's process gets it.

    network: process id in the names of the network that has these rates; None: loopback, which has none.
    out: file for the result. progress: file that rank 0 makes longer whenever something is done.
    """

    workload: str
    rates: tuple[float | None, ...]
    variants: tuple[str, ...]
    rounds: int
    block: int
    timeout: float
    timeline: bool
    synchronized: bool
    network: int | None
    out: str
    progress: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        values = json.loads(text)
        return cls(**{**values, "rates": tuple(values["rates"]), "variants": tuple(values["variants"])})


@dataclass
class Measured:
    """At one rate, by variant; per block: `seconds` and sent `wire_bytes` per step. predicted: simulated seconds.
    plans: of this project's modes, how many collectives, of them waited for in the next step, and messages. settled: of
    those that try plans, how long that took, and which one stayed.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    wire_bytes: dict[str, list[float]] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    plans: dict[str, dict[str, int]] = field(default_factory=dict)
    settled: dict[str, str] = field(default_factory=dict)
    timelines: dict[str, list[Span]] = field(default_factory=dict)
    simulated: dict[str, list[Span]] = field(default_factory=dict)


@dataclass
class Result:
    """Of one rank. at: what was measured, by the label of the rate. skipped: variant -> why."""

    at: dict[str, Measured] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Result:
        values = json.loads(text)
        return cls({rate: Measured(**each) for rate, each in values["at"].items()}, values["skipped"])
