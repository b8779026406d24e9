"""What verifying a step has found."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isnan


@dataclass(frozen=True)
class StepDifference:
    """A step difference is a value of a verified step that another one should have been.

    what: such as "parameter 0.weight", "exp_avg of 0.weight" or "loss".
    parameter: the name of the parameter; "" where it is none.
    ranks: where it differs.
    largest_on: the rank where it differs most.
    index: the place of the largest difference on that rank.
    step, replay: the values there, of the step and of its replay. NaN where `between_ranks`.
    between_ranks: whether it differs from what other ranks hold, and not from a replay.
    carried_by: the collective of the plan that brings the gradient or the parameter; "" without one.
    """

    what: str
    parameter: str
    ranks: tuple[int, ...]
    largest_on: int
    index: tuple[int, ...] = ()
    step: float = float("nan")
    replay: float = float("nan")
    between_ranks: bool = False
    carried_by: str = ""

    @property
    def size(self) -> float:
        """Of the largest difference; infinite where a value is NaN or ranks hold other values."""
        size = abs(self.step - self.replay)
        return inf if isnan(size) else size

    def __str__(self) -> str:
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        if self.between_ranks:
            return f"{self.what}: {ranks} hold{'' if len(self.ranks) > 1 else 's'} other values than the first rank"
        carried = f", carried by {self.carried_by}" if self.carried_by else ""
        where = f"at {list(self.index)}{f' of rank {self.largest_on}' if len(self.ranks) > 1 else ''}"
        return f"{self.what} on {ranks}: {where} {self.step!r} in place of {self.replay!r}{carried}"


@dataclass(frozen=True)
class VerifiedStep:
    """A verified step is the report on a step that was replayed from the graph before fusion.

    step: its number, as `step.steps` counts.
    bitwise: whether all bits were compared. Else sums might differ by rounding.
    compared: how many tensors were compared on this rank.
    between_ranks: how many tensors were compared over ranks.
    seconds: what verifying took on this rank, besides the step itself.
    copied_bytes: what the copies took that the replay works on.
    replay_bytes: what the replay took at most in all, as predicted.
    differences: of all ranks, the largest first; empty if all is well.
    """

    step: int
    bitwise: bool
    compared: int
    between_ranks: int
    seconds: float
    copied_bytes: int
    replay_bytes: int
    differences: tuple[StepDifference, ...] = ()

    def text(self) -> str:
        """The report in words: one line, and one for each difference."""
        how = "bit for bit" if self.bitwise else "within the order of sums"
        between = f", {self.between_ranks} over ranks" if self.between_ranks else ""
        took = f"{self.seconds:.3f} s, {_mib(self.copied_bytes)} of copies, {_mib(self.replay_bytes)} in all"
        count = len(self.differences)
        result = f"{count} difference{'s' if count > 1 else ''}" if count else "no difference"
        first = f"step {self.step}: {result} in {self.compared} tensors, compared {how}{between} ({took})"
        return "\n".join([first, *(f"  {each}" for each in self.differences)])


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"
