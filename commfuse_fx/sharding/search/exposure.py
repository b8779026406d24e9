"""Which part of the time of collectives a step waits for, as its simulation says: what a search has to pay for.

Why: docs/decisions.md, "The search of `auto` is exact on one axis, and whole plans decide between searches".
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from torch import fx

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.core.collectives import collective_of
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.simulate.rounds import Played

GRADIENT, PARAMETER = "gradients", "parameters"
"""Collectives that reduce gradients, and those that gather parameters. All others are of their phase."""

_ROLES = {"gradient": GRADIENT, "parameter": PARAMETER, "rows": PARAMETER}


@dataclass(frozen=True)
class Exposure:
    """An exposure says how much of the time of collectives counts.

    parts: (axis, kind, percent) of those kinds of collectives of which anything is known. All of the others counts.
    """

    parts: tuple[tuple[str, str, int], ...] = ()

    def of(self, group: str, kind: str) -> float:
        """The part that counts of the collectives of a kind on these axes."""
        names = group.split(",")
        found = [percent for axis, each, percent in self.parts if each == kind and axis in names]
        return max(found) / 100 if found else 1.0

    def on(self, group: str) -> dict[str, float]:
        """The part that counts of each kind of collectives on these axes, where anything is known."""
        return {kind: self.of(group, kind) for _, kind, _ in self.parts}

    def __str__(self) -> str:
        """As in "31% of gradients on dp, 100% of forward on dp"; "" where nothing is known."""
        return ", ".join(f"{percent}% of {kind} on {axis}" for axis, kind, percent in self.parts)

    def by_axis(self) -> str:
        """For people: "97% of forward, 0% of gradients on dp". Axes of which the same is known are named together."""
        known: dict[str, list[str]] = {}
        for axis, kind, percent in self.parts:
            known.setdefault(axis, []).append(f"{percent}% of {kind}")
        alike: dict[str, list[str]] = {}
        for axis, kinds in known.items():
            alike.setdefault(", ".join(kinds), []).append(axis)
        return "; ".join(f"{kinds} on {' and '.join(axes)}" for kinds, axes in alike.items())

    @classmethod
    def parse(cls, text: str) -> Exposure:
        """What `str` has written. Raises ConfigValueError for another text."""
        parts: list[tuple[str, str, int]] = []
        for each in text.split(", ") if text else ():
            words = each.split(" ")
            if len(words) != 5 or (words[1], words[3]) != ("of", "on") or not words[0][:-1].isdecimal():
                raise ConfigValueError(f"exposed={text!r}: write parts such as '31% of gradients on dp'")
            parts.append((words[4], words[2], int(words[0][:-1])))
        return cls(tuple(parts))


def exposure_of(program: Program, played: Played) -> Exposure:
    """What a step that was played has waited for, of the time of its collectives as a search prices them: on a network
    without bursts that carries nothing else meanwhile."""
    waited: dict[tuple[str, str], float] = {}
    priced: dict[tuple[str, str], float] = {}
    for piece in chain.from_iterable(played.pieces.values()):
        if piece.start in played.flown:
            for key in _counted_as(piece.start):
                priced[key] = priced.get(key, 0.0) + piece.transfer.latency + piece.transfer.transfer
    for start, flown in played.flown.items():
        for key in _counted_as(start):
            waited[key] = waited.get(key, 0.0) + flown.wait_left - flown.wait_entered
    found = (
        (axis, kind, round(100 * min(1.0, waited[axis, kind] / seconds)))
        for (axis, kind), seconds in priced.items()
        if seconds
    )
    return Exposure(tuple(sorted(found)))


def _counted_as(start: fx.Node) -> list[tuple[str, str]]:
    """The axes of a collective, each with its kind."""
    details = collective_of(start)
    kind = _ROLES.get(details.role, info(start).phase)
    return [(axis, kind) for axis in details.group.split(",")]
