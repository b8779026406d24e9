"""One message on the wire, as the simulation takes it.

Why: docs/decisions.md, "Bursts and busy latencies are figures of a level".
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from commfuse_fx.errors import ConfigValueError


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message, in seconds on an otherwise idle machine.

    stream: the queue that it goes through. latency: time that loads nothing. transfer: time that loads `links`,
    and of the core `host` seconds, spread evenly. burst: seconds of transfer that its links carry `boost` times as
    fast after a pause that is as long (a token bucket); host time is then at most what moving takes. slowed: how many
    times as long the latency is while the step computes, on the core that the backend's threads wait for; last: the
    part of the latency that the last message has. What has been sent moves while threads wait, but for the last
    message, behind which nothing is sent; where the step stands still they have the core at once. busy_speed: the part
    of its speed that it has at most while the step computes, in turn with the backend's threads.

    Raises ConfigValueError on a time below 0 or not finite, on host time without transfer time to spread it over, on
    a factor below 1, on a busy_speed that is not above 0 and at most 1, and on a last above the latency.
    """

    stream: str
    latency: float
    transfer: float
    host: float = 0.0
    links: tuple[str, ...] = ()
    burst: float = 0.0
    boost: float = 1.0
    slowed: float = 1.0
    busy_speed: float = 1.0
    last: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency", "transfer", "host", "burst", "last"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ConfigValueError(f"Transfer {name}={value!r}: give seconds, finite and not below 0")
        if self.host and not self.transfer:
            raise ConfigValueError(f"Transfer host={self.host!r} with transfer=0: host time needs transfer time")
        for name in ("boost", "slowed"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 1):
                raise ConfigValueError(f"Transfer {name}={value!r}: give a factor, finite and not below 1")
        if not 0 < self.busy_speed <= 1:
            raise ConfigValueError(f"Transfer busy_speed={self.busy_speed!r}: give a part above 0, at most 1")
        if self.last > self.latency:
            raise ConfigValueError(f"Transfer last={self.last!r}: a part of its latency={self.latency!r}")

    @property
    def lanes(self) -> int:
        """How many transfers of its stream are on their way at a time. Backends whose threads wait for the core that
        computes work on two: the latency of one passes while the other one moves, and both share what they move over.
        """
        return 2 if self.slowed > 1 else 1

    @property
    def overlapped(self) -> float:
        """The part of the latency that passes while another transfer of the stream moves."""
        return self.latency if self.lanes > 1 else 0.0

    @property
    def least_host(self) -> float:
        """What it takes of the core at least: all of it in a burst."""
        return min(self.host, self.transfer / self.boost) if self.burst else self.host

    @property
    def least_seconds(self) -> float:
        """What it takes of its stream at least: all of it in a burst."""
        return self.latency - self.overlapped + self.transfer / self.boost
