"""What became of a model that Dynamo has cut into graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commfuse_fx.inspect.lowered import Lowered
from commfuse_fx.ir.core.program import SKIPPED, Program

COUNTS = "reached_parameters"
"""What stands for a parameter where the ranks add up how many of them have reached each parameter."""


@dataclass(frozen=True, order=True)
class AsItIs:
    """A graph that runs op by op. params: those that it reads. reason: why it was not compiled."""

    params: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class GraphsExplanation:
    """All graphs of one model.

    compiled: the graphs that are compiled, in the order in which they were first run.
    as_they_are: those that are not.
    late: what reduces gradients at the end of a backward.
    """

    compiled: tuple[Lowered, ...]
    as_they_are: tuple[AsItIs, ...]
    late: tuple[Lowered, ...]

    def text(self) -> str:
        """The same as lines for people."""
        lines = [f"{len(self.compiled)} compiled graph(s), {len(self.as_they_are)} that run as they are"]
        for number, lowered in enumerate(self.compiled):
            lines.append(f"graph {number}: {_sent(lowered)}{_skipped(lowered.program)}")
        lines += [f"as it is: parameters {_first(each.params)}: {each.reason}" for each in self.as_they_are]
        lines += [f"at the end of the backward: {_sent(lowered)}" for lowered in self.late]
        for lowered in (*self.compiled, *self.late)[:1]:
            lines += [f"{each.option} has no effect {each.reason}" for each in lowered.program.config.without_effect]
        return "\n".join(lines) + "\n"


def _sent(lowered: Lowered) -> str:
    reduced = [each for each in lowered.collectives if each.kind == "all_reduce"]
    members = [member for each in reduced for member in each.members]
    params = [member for member in members if member != COUNTS]
    size = sum(each.bytes for each in reduced)
    if not params:
        return "reduces nothing"
    counts = ", and by how many ranks each was used," if COUNTS in members else ""
    return f"reduces {_first(params)}{counts} in {len(reduced)} all_reduce(s) of {size} bytes together"


def _skipped(program: Program) -> str:
    if not program.by_autograd:
        return ""
    skipped = ", ".join(note.subject for note in program.notes if note.topic == SKIPPED)
    passes = f"; skipped passes: {skipped}" if skipped else ""
    return f"; autograd runs its ops, as {program.by_autograd}{passes}"


def _first(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} other(s)"
