"""What figures of a machine can be. Wider than any machine's: what lies outside is a mistake in the file.

Sums of times are exact enough within these bounds; far outside, a second vanishes beside another and searches for the
shortest step go on without end. Speeds may be so high that what they stand for costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.support.checks import check_number, show


@dataclass(frozen=True)
class Bounds:
    """Finite numbers from `least` to `most`; and 0, where `zero` is True."""

    least: float
    most: float
    unit: str
    zero: bool = True

    def check(self, value: object, where: str) -> float:
        """`value` as a float. Raises ConfigTypeError for no number, ConfigValueError out of bounds."""
        number = check_number(value, where, positive=not self.zero)
        if number and not self.least <= number <= self.most:
            none = "0, or " if self.zero else ""
            raise ConfigValueError(
                f"{where} is {show(value)}; give {none}a number from {self.least:g} to {self.most:g} {self.unit}"
            )
        return number


SECONDS = Bounds(1e-15, 1e3, "seconds")
SECONDS_PER_BYTE = Bounds(1e-21, 1.0, "seconds per byte")
NODE_SECONDS = Bounds(1e-21, 1e5, "seconds")
SPEED = Bounds(1.0, 1e30, "bytes per second", zero=False)
SPEED_OR_NONE = Bounds(1.0, 1e30, "bytes per second")
FLOPS = Bounds(1.0, 1e30, "FLOP per second", zero=False)
BYTES = Bounds(1.0, 1e18, "bytes")

MOST_BYTES = 1 << 60
"""Of one device's memory."""

MOST_RANKS = 1 << 24
"""Of a cluster, and of a domain."""
