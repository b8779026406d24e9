"""Whether steps keep the pace that they had when their plan was chosen, and which ranks are slower than the others.

Why: docs/decisions.md, "What is tried costs little: no CUDA graph, no compile, three plans the second time".
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from statistics import median_low

WINDOW_SECONDS, FEWEST, MOST = 1.0, 10, 500
"""The pace is looked at after about so many seconds, so many steps at least and at most."""

CHANGED = 1.15
"""Steps that take so many times as long as before, or as many times less, do not keep their pace."""

IN_A_ROW = 2
"""So many looks in a row have to say so."""

CALM_SECONDS = 30.0
"""After plans were tried anew, about so many seconds pass before that happens again; twice as many each time that the
same plan has stayed."""

SLOW = 1.25
"""A rank is slow that computes so many times as long as others."""


class Pace:
    """The pace of one plan's steps. window: steps between two looks.

    calm: seconds, about, in which no change is told; one that lasts is told afterwards. usual: what a step takes as
    long as nothing has changed, if an earlier run knows it; 0: the first look says it.
    """

    def __init__(self, step_seconds: float, calm: float = 0.0, usual: float = 0.0) -> None:
        self.window = min(max(ceil(WINDOW_SECONDS / max(step_seconds, 1e-6)), FEWEST), MOST)
        self._calm_looks = ceil(calm / (self.window * max(step_seconds, 1e-6)))
        self.usual = usual
        self._changed = 0

    def change(self, seconds: float) -> str:
        """What has changed, given what a step takes now, in words; "" as long as nothing has, persistently."""
        self._calm_looks -= 1
        self.usual = self.usual or seconds
        ratio = seconds / self.usual
        self._changed = self._changed + 1 if not 1 / CHANGED < ratio < CHANGED else 0
        if self._changed < IN_A_ROW or self._calm_looks > 0:
            return ""
        return f"steps take {ratio:.2f} of the time that they took when their plan was chosen"


def slow_ranks(seconds: Sequence[float]) -> list[int]:
    """The ranks that compute longer than the others. seconds: what the nodes of a step take together, by rank."""
    return [rank for rank, each in enumerate(seconds) if each > SLOW * median_low(seconds)]
