"""Lists in texts for people, which end where they get too long."""

from __future__ import annotations

from collections.abc import Sequence


def shortened(lines: Sequence[str], most: int, rest: str) -> list[str]:
    """The first lines, `most` of them. Are there more, `rest` follows, with their number in place of {}."""
    return list(lines) if len(lines) <= most else [*lines[:most], rest.format(len(lines) - most)]
