"""Agreement between ranks before the first collective of every step.

Each step every rank casts a vote over a small Gloo group: a hash of its plan, and whether it has failed
so far. The vote is started when the backward begins and read before the first collective, so it hides
behind compute. If the ranks differ, all of them learn it from the same votes, exchange their plans, and
raise; nobody is left waiting in a collective that the others will never join.

The hash covers the number of the compiled step too, so ranks that call different steps notice it in the same way.

Votes travel by all_to_all, in which every rank sends to every other rank directly. A Gloo all_reduce would go around
a ring twice, and each hop would wait for a core that is busy with compute.

Why: docs/decisions.md, "Ranks vote before the first collective of every step".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from commfuse_fx.errors import CollectiveError, PeerFailedError, PlanMismatchError
from commfuse_fx.machine.timeline import Timeline
from commfuse_fx.runtime.ranks.ballot_box import ballot_box
from commfuse_fx.runtime.ranks.ballots import Ballot, Vote, explain_failures, explain_mismatch
from commfuse_fx.runtime.ranks.callers import OutOfTurn
from commfuse_fx.runtime.ranks.distress import keep_forever
from commfuse_fx.runtime.ranks.joining.world import world_timeout
from commfuse_fx.runtime.ranks.lost_votes import NOTHING_DONE, explain_lost_votes
from commfuse_fx.runtime.ranks.seeds import release_waiting_ranks
from commfuse_fx.support.objects import exchange_objects

log = logging.getLogger("commfuse_fx.runtime")


_VOTES, _FAILED, _ATTENDS = range(3)
"""What a vote is: for a plan, that the rank cannot go on, or that it goes where the others go."""

_NOT_CAST = -1
"""Stands where a vote is to arrive."""


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
        self._since = 0.0  # when the vote was cast
        self._sent = self._arriving = torch.zeros(0, dtype=torch.int64, device="cpu")
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

        expected: whether the other ranks wait for this rank's vote, and the same call will not be made again.
        lost: whether collectives that the previous step left on the wire have failed.
        """
        if self._is_running or lost:
            self._box.broken = type(error).__name__
            for held in (self._sent, self._arriving, self._work):
                keep_forever(held)
            self.distress.call(f"rank {self.rank}: {type(error).__name__}: {error}")
        elif expected and not self.has_voted:
            self._fail(error)

    def cast(self, vote: Vote) -> None:
        """Start the vote, and return at once. Raises CollectiveError if the connections are gone."""
        world = dist.get_world_size(self._box.group)
        self._sent = torch.tensor(vote, device="cpu").repeat(world)
        self._arriving = torch.full_like(self._sent, _NOT_CAST)
        self._since = since = perf_counter()
        self.distress.tell_no_more(self.rank)
        try:
            self._work = dist.all_to_all_single(self._arriving, self._sent, group=self._box.group, async_op=True)
        except RuntimeError as error:
            raise self._lost(error, since) from error
        self._is_running = vote.kind != _FAILED
        if self.timeline is not None:
            self.timeline.issued(self, "agreement", f"vote bytes={self._arriving.nbytes}", since, self._work)

    def attend(self) -> int:
        """Take part in a vote of the other ranks, whatever they vote for. Returns the signature that they agree on.

        Raises what `settle` and `cast` raise.
        """
        self.cast(Vote(0, _ATTENDS))
        return self._read(None)[0].signature

    def settle(self, ballot: Ballot) -> Sequence[Vote]:
        """Read the vote. Returns what ranks voted that do not just attend, each vote once; none if it was read before.

        Raises PlanMismatchError or PeerFailedError, on every rank alike.
        """
        return () if self._settled else self._read(ballot)

    def _read(self, ballot: Ballot | None) -> Sequence[Vote]:
        self._settled = True
        own = "" if ballot is None else ballot.between_steps
        different = map(Vote._make, dict.fromkeys(map(tuple, self._result(own))))
        votes = [vote for vote in different if vote.kind != _ATTENDS]
        failed = any(vote.kind == _FAILED for vote in votes)
        differ = any(vote.signature != votes[0].signature for vote in votes)
        self._is_running = not failed and not differ
        if failed:
            raise PeerFailedError(explain_failures(self._exchange("")))
        if differ:
            mine = None if ballot is None else replace(ballot, others=self.callers.have_others())
            raise self._mismatch(self._exchange(mine))
        return votes

    def from_rank_0(self, mine: Any) -> Any:
        """Return rank 0's object. All ranks call this together, between a vote and the next one."""
        return self._exchange(mine if self.rank == 0 else None)[0]

    def from_all(self, mine: Any, left: str = NOTHING_DONE) -> list[Any]:
        """Return the objects of all ranks, by rank. All ranks call this together, when no vote is under way.

        left: how a rank is left that others do not answer, for the message.
        """
        return self._exchange(mine, left)

    @contextmanager
    def outside_of_steps(self, what: str) -> Iterator[Callable[[Any], Any]]:
        """Inside of the block the ranks send to each other what is no part of a step, after `from_all`.

        what: they do, for messages. Yields what lets the work of a Gloo collective end when a rank has left. Raises
        CollectiveError for what the backend raises.
        """
        self._is_running = True  # a rank that leaves tells the others
        try:
            yield self.distress.heed
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank}: {what} failed. Another rank has died, is stuck or left early; its own output says "
                f"why. Nothing was updated. [{type(error).__name__}: {error}]"
            ) from error
        self._is_running = False

    def _fail(self, error: BaseException) -> None:
        """Vote that this rank cannot go on with this step."""
        self._settled = True
        if self.rank == 0:
            with suppress(RuntimeError):  # the store is gone: the vote fails as well
                release_waiting_ranks(self.name)
        try:
            self.cast(Vote(0, _FAILED))
            self._result()
            self._exchange(f"{type(error).__name__}: {error}")
        except CollectiveError as lost:
            self._box.broken = type(error).__name__
            log.warning("could not tell the other ranks about the error: %s", lost)

    def _result(self, own: str = "") -> list[list[int]]:
        """Wait for the votes, by rank. own: what this rank does instead of a step."""
        try:
            work = self.distress.heed(self._work)
            if self.timeline is None:
                work.wait()
            else:
                self.timeline.wait(self, work)
        except RuntimeError as error:
            raise self._lost(error, self._since, self._silent_ranks(), own) from error
        finally:
            self._work = None
        return self._arrived()

    def _arrived(self) -> list[list[int]]:
        found: list[list[int]] = self._arriving.view(-1, len(Vote._fields)).tolist()
        return found

    def _exchange(self, mine: Any, left: str = NOTHING_DONE) -> list[Any]:
        since = perf_counter()
        try:
            return exchange_objects(mine, self._gather)
        except RuntimeError as error:
            self._box.broken = type(error).__name__
            raise self._lost(error, since, left=left) from error

    def _gather(self, given: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(given) for _ in range(dist.get_world_size(self._box.group))]
        dist.all_gather(rows, given, self._box.group)
        return rows

    def _silent_ranks(self) -> list[int]:
        """The ranks whose votes have not arrived."""
        votes = enumerate(map(Vote._make, self._arrived()))
        return [rank for rank, vote in votes if vote.kind == _NOT_CAST and rank != self.rank]

    def _lost(
        self,
        error: RuntimeError,
        since: float,
        silent: Sequence[int] = (),
        own: str = "",
        left: str = NOTHING_DONE,
    ) -> CollectiveError:
        waited, limit = perf_counter() - since, world_timeout().total_seconds()
        told = self.distress.told_by(silent)
        before = own or "the first collective of the step"
        why = explain_lost_votes(str(error), silent, waited, limit, own, told, left)
        return CollectiveError(
            f"rank {self.rank}: the agreement before {before} failed: {why}. [{type(error).__name__}: {error}]"
        )

    def _mismatch(self, cast: list[Ballot | None]) -> Exception:
        given = {rank: ballot for rank, ballot in enumerate(cast) if ballot is not None}
        first, *_ = ballots = list(given.values())
        out_of_turn = [each for each in ballots if each.number != first.number]
        if out_of_turn and all(each.others for each in out_of_turn):
            return OutOfTurn(first.number)
        error = PlanMismatchError(explain_mismatch(given))
        same = len({(each.number, each.captured, each.verifies) for each in ballots}) == 1
        # All ranks compute this from the same ballots, so all of them go on alike.
        error.may_agree = same and not all(each.in_common for each in ballots)
        return error
