"""How often a step offers its core to the backend's threads, which move data on it.

Why: docs/decisions.md, "A rank with one core shares it with Gloo's threads".
"""

from __future__ import annotations

TURN, LONGEST_TURN = 5e-4, 2e-3
"""Seconds of compute between two turns, and on a slow network."""

TURN_BYTES = 200_000
"""About so many should have come since the last turn: a segment of 1 MiB does not wait for its thread then."""


def turn_seconds(bandwidth: float) -> float:
    """Seconds of compute between two turns on a network of this many bytes per second."""
    return min(max(TURN, TURN_BYTES / bandwidth), LONGEST_TURN)
