"""Agreement between ranks before the first collective of every step.

Each step every rank casts a vote over a small Gloo group: a hash of its plan, and whether it has failed
so far. The vote is started when the backward begins and read before the first collective, so it hides
behind compute. If the ranks differ, all of them learn it from the same votes, exchange their plans, and
raise; nobody is left waiting in a collective that the others will never join.

The hash covers the number of the compiled step too, so ranks that call different steps notice it in the same way.

Votes travel by all_to_all, in which every rank sends to every other rank directly. A Gloo all_reduce would go around
a ring twice, and each hop would wait for a core that is busy with compute.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from commfuse_fx.errors import CollectiveError, PeerFailedError, PlanMismatchError
from commfuse_fx.machine.timeline import Timeline
from commfuse_fx.runtime.ranks.ballot_box import ballot_box
from commfuse_fx.runtime.ranks.ballot_order import same_but_for_order
from commfuse_fx.runtime.ranks.callers import OutOfTurn
from commfuse_fx.runtime.ranks.distress import keep_forever
from commfuse_fx.runtime.ranks.seeds import release_waiting_ranks

log = logging.getLogger("commfuse_fx.runtime")


def hash62(text: str) -> int:
    """A positive integer that fits 62 bits, the same on every rank and run."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2


def checksum(tensors: list[torch.Tensor]) -> int:
    """A checksum of these values, in 0..2**62-1. Ranks with different values almost surely get different checksums."""
    total = 0
    for number, tensor in enumerate(tensors):
        bits = tensor.detach().double().sum().view(torch.int64)
        total = (total * 31 + int(bits) + number) % (1 << 62)
    return total


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
    """

    number: int
    model: str
    captured: str
    full: str
    plan: str
    in_common: bool = False
    others: bool = False
    is_module: bool = False

    @cached_property
    def signature(self) -> int:
        return hash62(f"{self.number}\n{self.captured}\n{self.plan}")


class Agreement:
    """An agreement casts and reads the votes of one rank on one compiled step.

    All ranks must create their agreements in the same order.

    number: the number of the compiled step, from 1.
    distress: the distress channel of the world.
    name: a key for this step, the same on every rank.
    """

    def __init__(self) -> None:
        self._box = ballot_box()
        self.number = self._box.next_step()
        self.distress = self._box.distress
        self.callers = self._box.callers
        self.name = f"{self.distress.name}/{self.number}"
        self._work: Any = None
        self._is_running = False
        self._sent = self._votes = torch.zeros(0, dtype=torch.int64, device="cpu")
        self._settled = True
        self.rank = dist.get_rank()
        self.timeline: Timeline | None = None

    @property
    def has_voted(self) -> bool:
        """Whether this step's vote has been cast or settled."""
        return self._settled or self._work is not None

    def begin_step(self) -> None:
        """Prepare for the step's vote. Raises CollectiveError if an earlier step ended between its collectives."""
        if self._box.broken:
            raise CollectiveError(
                f"rank {self.rank}: an earlier step ended between its collectives ({self._box.broken}), so the ranks "
                "are no longer at the same place: start all ranks again from a checkpoint"
            )
        self._settled = False
        self._is_running = False
        self._work = None

    def end_step(self) -> None:
        """Note that all collectives of the step are done."""
        self._is_running = False

    def leave_step(self, error: BaseException, expected: bool, lost: bool = False) -> None:
        """End the step on this rank by `error`. Tell the other ranks if that is still possible.

        expected: whether the other ranks wait for this rank's vote.
        lost: whether collectives that the previous step left on the wire have failed.
        """
        if self._is_running or lost:
            self._box.broken = type(error).__name__
            for held in (self._sent, self._votes, self._work):
                keep_forever(held)
            self.distress.call(f"rank {self.rank}: {type(error).__name__}: {error}")
        elif expected and not self.has_voted and isinstance(error, Exception):
            self._fail(error)

    def cast(self, signature: int, parameters: int = 0, failed: bool = False) -> None:
        """Start the vote, and return at once. Raises CollectiveError if the connections are gone."""
        world = dist.get_world_size(self._box.group)
        self._sent = torch.tensor([signature, int(failed), parameters], device="cpu").repeat(world)
        self._votes = torch.empty_like(self._sent)
        since = perf_counter()
        try:
            self._work = dist.all_to_all_single(self._votes, self._sent, group=self._box.group, async_op=True)
        except RuntimeError as error:
            raise self._lost(error) from error
        self._is_running = not failed
        if self.timeline is not None:
            self.timeline.issued(self, "agreement", f"vote bytes={self._votes.nbytes}", since, self._work)

    def settle(self, ballot: Ballot) -> None:
        """Read the vote. Raises PlanMismatchError or PeerFailedError, on every rank alike."""
        if self._settled:
            return
        self._settled = True
        signatures, failures, parameters = zip(*self._result(), strict=True)
        failed, differ = any(failures), len(set(signatures)) > 1
        self._is_running = not failed and not differ
        if failed:
            raise PeerFailedError(self._explain_failure(self._exchange("")))
        if differ:
            raise self._mismatch(self._exchange(replace(ballot, others=self.callers.have_others())))
        if len(set(parameters)) > 1:
            log.warning(
                "parameters differ between ranks before the first step: seed all ranks alike, or pass "
                "parameter_broadcast=True to start from rank 0's"
            )

    def from_rank_0(self, mine: Any) -> Any:
        """Return rank 0's object. All ranks call this together, between a vote and the next one."""
        return self._exchange(mine if self.rank == 0 else None)[0]

    def from_all(self, mine: Any) -> list[Any]:
        """Return the objects of all ranks, by rank. All ranks call this together, when no vote is under way."""
        return self._exchange(mine)

    def _fail(self, error: BaseException) -> None:
        """Vote that this rank cannot go on with this step."""
        self._settled = True
        if self.rank == 0:
            with suppress(RuntimeError):  # the store is gone: the vote fails as well
                release_waiting_ranks(self.name)
        try:
            self.cast(0, failed=True)
            self._result()
            self._exchange(f"{type(error).__name__}: {error}")
        except CollectiveError as lost:
            self._box.broken = type(error).__name__
            log.warning("could not tell the other ranks about the error: %s", lost)

    def _result(self) -> list[list[int]]:
        """Wait for the votes. Each is the hash of a plan, whether the rank failed, and a checksum of its parameters."""
        try:
            work = self.distress.heed(self._work)
            if self.timeline is None:
                work.wait()
            else:
                self.timeline.wait(self, work)
        except RuntimeError as error:
            raise self._lost(error) from error
        finally:
            self._work = None
        votes: list[list[int]] = self._votes.view(-1, 3).tolist()
        return votes

    def _exchange(self, mine: Any) -> list[Any]:
        gathered: list[Any] = [None] * dist.get_world_size(self._box.group)
        try:
            dist.all_gather_object(gathered, mine, self._box.group)
        except RuntimeError as error:
            self._box.broken = type(error).__name__
            raise self._lost(error) from error
        return gathered

    def _lost(self, error: RuntimeError) -> CollectiveError:
        return CollectiveError(
            f"rank {self.rank}: the agreement before the first collective of the step failed: another rank has died or "
            f"did not reach this step within the time-out. Nothing was updated. [{type(error).__name__}: {error}]"
        )

    def _explain_failure(self, messages: list[Any]) -> str:
        said = [(rank, text) for rank, text in enumerate(messages) if isinstance(text, str) and text]
        causes = "; ".join(f"rank {rank}: {text}" for rank, text in said)
        return f"another rank failed in this step before its first collective, so no rank updates. {causes}"

    def _mismatch(self, ballots: list[Ballot]) -> Exception:
        first = ballots[0].number
        out_of_turn = [each for each in ballots if each.number != first]
        if out_of_turn and all(each.others for each in out_of_turn):
            return OutOfTurn(first)
        error = PlanMismatchError(self._explain_mismatch(ballots))
        same = all(each.number == ballots[0].number and each.captured == ballots[0].captured for each in ballots)
        # All ranks compute this from the same ballots, so all of them go on alike.
        error.may_agree = same and not all(each.in_common for each in ballots)
        return error

    def _explain_mismatch(self, ballots: list[Any]) -> str:
        first = ballots[0]
        for other, ballot in enumerate(ballots):
            if not isinstance(ballot, Ballot) or not isinstance(first, Ballot):
                continue
            if ballot.number != first.number:
                return (
                    f"ranks 0 and {other} called different steps, counted in the order in which they were compiled\n"
                    f"  rank 0: step {first.number}, of {first.model}\n"
                    f"  rank {other}: step {ballot.number}, of {ballot.model}\n"
                    "Compile the same steps in the same order on every rank, and call them in the same order."
                )
            if (ballot.captured, ballot.plan) != (first.captured, first.plan):
                if first.is_module and ballot.captured != first.captured:
                    return _other_parameters(first, ballot, other)
                line, one, two = _first_difference(first, ballot)
                advice = "the same model, configuration and optimizer, and batches of the same structure"
                if ballot.captured == first.captured:
                    advice = "the same optimizer state and, with a memory_limit, batches of the same size"
                elif same_but_for_order(ballot.captured, first.captured):
                    advice = (
                        "the same order: their models compute the same ops, but in different orders, or they add the "
                        "terms of a sum in different orders. A set of strings, for example, has another order in every "
                        "process. Iterate over sorted(...) there, or start all ranks with the same hash seed: "
                        "PYTHONHASHSEED=0 torchrun ..."
                    )
                return (
                    f"ranks 0 and {other} compiled different plans; the first difference is in line {line}\n"
                    f"  rank 0: {one}\n  rank {other}: {two}\nGive every rank {advice}."
                )
        return "the ranks' plans differ in their hashes but not in their texts; run again with COMMFUSE_VERIFY=1"


def _first_difference(one: Ballot, two: Ballot) -> tuple[int, str, str]:
    """The number of the first line that must agree and does not, and the full line of each rank."""
    keys = [[*ballot.captured.splitlines(), *ballot.plan.splitlines()] for ballot in (one, two)]
    full = [[*ballot.full.splitlines(), *ballot.plan.splitlines()] for ballot in (one, two)]
    for i in range(max(len(keys[0]), len(keys[1]))):
        if i >= len(keys[0]) or i >= len(keys[1]) or keys[0][i] != keys[1][i]:
            return i + 1, *(lines[i] if i < len(lines) else "(no such line)" for lines in full)  # type: ignore[return-value]
    return 0, "", ""


def _other_parameters(first: Ballot, ballot: Ballot, other: int) -> str:
    """The error for a module whose backward reaches other parameters on rank `other` than on rank 0."""
    one, two = first.captured.splitlines(), ballot.captured.splitlines()
    missing = [(other, line) for line in one if line not in two] + [(0, line) for line in two if line not in one]
    texts = [f"rank {rank} has no {line}" for rank, line in missing[:5]]
    more = f"\n  and {len(missing) - 5} more" if len(missing) > 5 else ""
    listed = "\n  ".join(texts) or "the parameters stand in another order"
    return (
        f"ranks 0 and {other} use different parameters\n  {listed}{more}\nLet every rank use the same parameters, or "
        "pass find_unused_parameters=True to cf.compile."
    )
