"""What ranks vote on, what a vote carries, and what differing votes come from.

Why: docs/decisions.md, "Batches may be uneven in data_parallel".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from commfuse_fx.runtime.ranks.ballot_order import same_but_for_order
from commfuse_fx.support.long_lists import shortened


def hash62(text: str) -> int:
    """A positive integer that fits 62 bits, the same on every rank and run."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2


class Vote(NamedTuple):
    """A vote is what one rank sends to all others: a whole number per field. A further number is a further field.

    signature: that of the ballot. kind: one of `Agreement`'s.
    wish: what the rank would like to do with the step. All ranks do the smallest wish.
    starts, numbers, written: hashes of what ranks should have alike, 0 where that is not compared: the parameters that
        training begins with, the numbers of the optimizer, and what users have written to divided tensors.
    """

    signature: int
    kind: int = 0
    wish: int = 0
    starts: int = 0
    numbers: int = 0
    written: int = 0


@dataclass(frozen=True)
class Ballot:
    """A ballot is one rank's vote on its plan, with the texts that explain it to the other ranks if votes differ.

    number: the number of the compiled step, in the order in which the program compiled its steps.
    model: the name of the model's class.
    captured: the text of the captured graph, without what may differ between ranks.
    full: the same text with all details, line by line as in `captured`. Error messages quote it.
    plan: the text of the plan's collectives, as `communication_text` gives it.
    in_common: whether the plan follows from prices that all ranks share.
    others: whether other threads of this rank call steps too. Their steps may be the ones that other ranks called.
    is_module: whether the step is a compiled module. Then `captured` lists the parameters that have a gradient.
    verifies: that the rank verifies the step, as one of so many; 0: it does not.
    between_steps: what the rank does instead of a step, such as saving; "" for a step.
    """

    number: int
    model: str
    captured: str
    full: str
    plan: str
    in_common: bool = False
    others: bool = False
    is_module: bool = False
    between_steps: str = ""
    verifies: int = 0

    @cached_property
    def signature(self) -> int:
        verified = f"\nverified {self.verifies}" if self.verifies else ""
        return hash62(f"{self.number}\n{self.captured}\n{self.plan}{verified}")


def explain_mismatch(ballots: Mapping[int, Ballot]) -> str:
    """Why the ballots of these ranks differ, and what to do."""
    (one, first), *others = ballots.items()
    for other, ballot in others:
        if ballot.number != first.number:
            return (
                f"ranks {one} and {other} called different steps, counted in the order in which they were compiled\n"
                f"  rank {one}: step {first.number}, of {first.model}\n"
                f"  rank {other}: step {ballot.number}, of {ballot.model}\n"
                "Compile the same steps in the same order on every rank, and call them in the same order."
            )
        if ballot.between_steps != first.between_steps:
            here, there = (
                each.between_steps or ("a backward" if each.is_module else "the step") for each in (first, ballot)
            )
            return (
                f"ranks {one} and {other} called different methods of a step\n"
                f"  rank {one}: {here}\n  rank {other}: {there}\n"
                "All ranks call them together, with the same arguments, and between the same steps."
            )
        if ballot.verifies != first.verifies:
            here, there = (
                f"step.verify(every={each.verifies})" if each.verifies else "does not verify this step"
                for each in (first, ballot)
            )
            return (
                f"ranks {one} and {other} do not verify the same steps\n  rank {one}: {here}\n  rank {other}: {there}\n"
                "Call step.verify() with the same number on all ranks, between the same steps."
            )
        if (ballot.captured, ballot.plan) != (first.captured, first.plan):
            if first.is_module and ballot.captured != first.captured:
                return _other_parameters(one, first, other, ballot)
            line, here, there = _first_difference(first, ballot)
            advice = "the same model, configuration and optimizer, and batches of the same structure"
            if first.is_module and _sends_the_same(ballot, first):
                advice = (
                    "the same order: they take other branches, which compute gradients in other orders. Or pass "
                    "find_unused_parameters=True to cf.compile, which sends them in the order of the parameters"
                )
            elif ballot.captured == first.captured:
                advice = (
                    "the same optimizer state and, where a graph is divided (semi_auto, auto) or a memory_limit is "
                    "given, batches of the same size"
                )
            elif same_but_for_order(ballot.captured, first.captured):
                advice = (
                    "the same order: their models compute the same ops, but in different orders, or they add the "
                    "terms of a sum in different orders. A set of strings, for example, has another order in every "
                    "process. Iterate over sorted(...) there, or start all ranks with the same hash seed: "
                    "PYTHONHASHSEED=0 torchrun ..."
                )
            return (
                f"ranks {one} and {other} compiled different plans; the first difference is in line {line}\n"
                f"  rank {one}: {here}\n  rank {other}: {there}\nGive every rank {advice}."
            )
    return "the ranks' plans differ in their hashes but not in their texts; run again with COMMFUSE_VERIFY=1"


def explain_failures(messages: Sequence[object]) -> str:
    """What ranks have said that cannot go on."""
    said = [(rank, text) for rank, text in enumerate(messages) if isinstance(text, str) and text]
    causes = "; ".join(f"rank {rank}: {text}" for rank, text in said)
    return f"another rank failed in this step before its first collective, so no rank updates. {causes}"


def explain_writes(of_ranks: Sequence[Mapping[str, int]]) -> str:
    """What ranks have written differently to tensors that are divided. of_ranks: checksums by name, of each rank."""
    rank = next((rank for rank, each in enumerate(of_ranks) if each != of_ranks[0]), 0)
    one, two = of_ranks[0], of_ranks[rank]
    names = [name for name in {**one, **two} if one.get(name) != two.get(name)]
    return (
        f"ranks 0 and {rank} hold other values of {', '.join(shortened(names, 4, '{} other tensors'))}, of which each "
        "rank keeps a part: what the other ranks have written to that part would be lost. Nothing was updated. Write "
        "the same values on all ranks: those that follow from gradients of a backward outside of no_sync(), that are "
        "drawn from one seed, or that rank 0 has sent"
    )


def _first_difference(one: Ballot, two: Ballot) -> tuple[int, str, str]:
    """The number of the first line that must agree and does not, and the full line of each rank."""
    keys = [[*ballot.captured.splitlines(), *ballot.plan.splitlines()] for ballot in (one, two)]
    full = [[*ballot.full.splitlines(), *ballot.plan.splitlines()] for ballot in (one, two)]
    for i in range(max(len(keys[0]), len(keys[1]))):
        if i >= len(keys[0]) or i >= len(keys[1]) or keys[0][i] != keys[1][i]:
            first, second = (lines[i] if i < len(lines) else "(no such line)" for lines in full)
            return i + 1, first, second
    return 0, "", ""


def _sends_the_same(one: Ballot, two: Ballot) -> bool:
    """Whether what is sent differs in nothing but its order."""
    return sorted(re.findall(r"[\w.]+", one.plan)) == sorted(re.findall(r"[\w.]+", two.plan))


def _other_parameters(one: int, first: Ballot, other: int, ballot: Ballot) -> str:
    """The error for a module whose backward reaches other parameters on rank `other` than on rank `one`."""
    here, there = ({line.partition(":")[0]: line for line in each.captured.splitlines()} for each in (first, ballot))
    missing = [(other, line) for name, line in here.items() if name not in there]
    missing += [(one, line) for name, line in there.items() if name not in here]
    unlike = [name for name, line in here.items() if there.get(name, line) != line]
    if unlike and not missing:
        name = unlike[0]
        return (
            f"ranks {one} and {other} have gradients of other kinds\n  rank {one}: {here[name]}\n"
            f"  rank {other}: {there[name]}\nGive every parameter the same dtype and the same memory format "
            "(torch.channels_last or not) on all ranks."
        )
    texts = [f"rank {rank} has no {line}" for rank, line in missing[:5]]
    more = f"\n  and {len(missing) - 5} more" if len(missing) > 5 else ""
    listed = "\n  ".join(texts) or "the parameters stand in another order"
    advice = (
        "Freeze the same parameters on every rank, and use the same, or pass find_unused_parameters=True to cf.compile"
    )
    if first.between_steps:  # they gather what they use
        advice = "Let every rank use the same parameters, which ranks have divided and gather together"
    return f"ranks {one} and {other} use different parameters\n  {listed}{more}\n{advice}."
