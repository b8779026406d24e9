"""The votes of one step's ranks: on each plan, and on values and numbers that they should have alike.

Why: docs/decisions.md, "A vote carries hashes of what ranks should have alike".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from commfuse_fx.config.fusion_marks import is_of_each_rank
from commfuse_fx.errors import PlanMismatchError
from commfuse_fx.planning.planner import Planner
from commfuse_fx.runtime.memory.shards import Shards
from commfuse_fx.runtime.memory.value_checksum import value_checksum
from commfuse_fx.runtime.ranks.agreement import Agreement
from commfuse_fx.runtime.ranks.ballots import Ballot, Vote, explain_writes, hash62
from commfuse_fx.runtime.ranks.broadcast import broadcast_parameters
from commfuse_fx.support.long_lists import shortened
from commfuse_fx.votes.optimizer_numbers import ADVICE, OptimizerNumbers, differences
from commfuse_fx.votes.runners import Runner

log = logging.getLogger("commfuse_fx.runtime")


class Voting:
    """Voting is what one step's ranks agree on before they send.

    is_started: whether all have run a first step. starts_differ: whether they have begun with different parameters, and
    so go on with different ones.
    """

    def __init__(self, planner: Planner, agreement: Agreement | None) -> None:
        self.is_started = False
        self._planner = planner
        self._agreement = agreement
        self.starts_differ = False
        self._starts = 0
        self._numbers = OptimizerNumbers(planner.optimizer, planner.config.parallel_mode == "hybrid_parallel")
        self._is_between_votes = False
        self._verifies = 0

    def release(self) -> None:
        """Let go of the process group: there is no vote any more."""
        self._agreement = None

    def start(self, runner: Runner) -> None:
        """Before the first step: agree on the plan, then send or compare the parameters' first values."""
        agreement, config = self._agreement, self._planner.config
        if agreement is None or runner.ballot is None:
            return  # an evaluation: the first step is still to come
        shared = [
            param.detach()
            for param in self._planner.watch.params.values()
            if not is_of_each_rank(param, config.parallel_mode)
        ]
        if config.parameter_broadcast:
            self.cast(runner)
            self._settle(self._ballot(runner), runner, _rewritten_by(runner))
            agreement.begin_step()
            broadcast_parameters(shared)
            if runner.executor.shards is not None:
                runner.executor.shards.take()
        else:
            self._starts = value_checksum(shared)

    def cast(self, runner: Runner, wish: int = 0) -> None:
        """Start the vote on the runner's plan. wish: as in `Vote`."""
        numbers = self._numbers.hash() if runner.changes else 0
        self._cast(self._ballot(runner), _rewritten_by(runner), wish, numbers)

    def _cast(self, ballot: Ballot, rewritten: Shards | None, wish: int = 0, numbers: int = 0) -> None:
        assert self._agreement is not None
        written = hash62(repr(sorted(found.items()))) if (found := self._written(rewritten)) else 0
        self._agreement.cast(Vote(ballot.signature, 0, wish, self._starts, numbers, written))

    def _written(self, shards: Shards | None) -> dict[str, int]:
        """Checksums of what users may have written to whole tensors of which ranks keep parts from now on."""
        return {} if shards is None else shards.written(but_parameters=not self.is_started)

    def cast_in_step(self, runner: Runner) -> None:
        """The same within a step, unless the ranks vote on it outside of it."""
        assert self._agreement is not None
        if not (self._agreement.has_voted or self._is_between_votes):
            self.cast(runner)

    def settle_in_step(self, runner: Runner) -> None:
        """As `settle`, unless the ranks vote on the step outside of it."""
        if not self._is_between_votes:
            self.settle(runner)

    @contextmanager
    def between_votes(self) -> Iterator[None]:
        """After a vote, inside of the block, ranks prepare for another vote on the same step. All of them enter it.

        An error in the block is one before a vote: this rank votes that it cannot go on.
        """
        if self._agreement is not None:
            self._agreement.begin_step()
        self._is_between_votes = True
        try:
            yield
        finally:
            self._is_between_votes = False

    def least_wish(self, runner: Runner, wish: int) -> int:
        """Vote before the step begins: the smallest wish of all ranks. Ranks that vote within the step wish 0.

        Raises what `settle` raises.
        """
        if self._agreement is None or runner.ballot is None:
            return wish
        self.cast(runner, wish)
        return min(vote.wish for vote in self.settle(runner))

    def meet(self, runner: Runner, mine: Any) -> list[Any]:
        """What each rank has, by rank. All ranks come here before the same step, and learn if one of them has failed.

        runner: of a step that all of them have run before.
        """
        assert self._agreement is not None
        self.cast(runner)
        self.settle(runner)
        found = self._agreement.from_all(mine)
        self._agreement.begin_step()
        return found

    def leave(self, error: BaseException) -> None:
        """Tell the other ranks, which meet this one more than once before a step, that it has left by this error."""
        assert self._agreement is not None
        self._agreement.leave_step(error, expected=True)

    def outside_of_steps(self, what: str) -> AbstractContextManager[Callable[[Any], Any]]:
        """As that of the agreement, after `meet`."""
        assert self._agreement is not None
        return self._agreement.outside_of_steps(what)

    def settle(self, runner: Runner) -> Sequence[Vote]:
        """Read it, before the first collective. Returns what `Agreement.settle` does.

        Raises PlanMismatchError or PeerFailedError, on every rank alike.
        """
        votes = self._settle(self._ballot(runner), runner, rewritten := _rewritten_by(runner))
        # Not before: a step in which a rank failed is not the first step of any rank.
        self.is_started = True
        if rewritten is not None:
            rewritten.release()
        return votes

    def agree_on_forward(self, runner: Runner) -> None:
        """Vote on the forward of a module whose parameters are divided. Raises what `settle` raises."""
        assert runner.forward is not None, "it sends"
        shards = runner.executor.shards
        self._cast(runner.forward, shards)
        self._settle(runner.forward, runner, shards)
        self.is_started = True
        if shards is not None:
            shards.release()

    def _settle(self, ballot: Ballot, runner: Runner, rewritten: Shards | None) -> Sequence[Vote]:
        assert self._agreement is not None
        votes = self._agreement.settle(ballot)
        self._starts = 0
        if len({vote.starts for vote in votes}) > 1:
            self.starts_differ = True
            log.warning(
                "parameters differ between ranks before the first step: seed all ranks alike, or pass "
                "parameter_broadcast=True to start from rank 0's"
            )
        if len({vote.written for vote in votes}) > 1:
            self._refuse_writes(self._agreement.from_all(self._written(rewritten)))
        if len({vote.numbers for vote in votes}) > 1:
            self._compare_numbers(divides=runner.executor.shards is not None)
        return votes

    def _refuse_writes(self, of_ranks: Sequence[dict[str, int]]) -> None:
        assert self._agreement is not None
        self._agreement.end_step()  # all ranks raise this, and nothing was sent
        raise PlanMismatchError(explain_writes(of_ranks))

    def _compare_numbers(self, divides: bool) -> None:
        assert self._agreement is not None
        found = differences(self._agreement.from_all(self._numbers.by_key()))
        said = "; ".join(shortened(list(found.values()), 4, "{} other numbers"))
        if divides:
            self._agreement.end_step()
            raise PlanMismatchError(
                f"{said}, and each rank updates a part of what is divided: the parts would follow other numbers. "
                f"Nothing was updated. {ADVICE}"
            )
        self._numbers.leave_out(found)
        log.warning("%s: replicas of the parameters drift apart. %s", said, ADVICE)

    @contextmanager
    def verifying(self, every: int) -> Iterator[None]:
        """The step inside of the block is one that this rank verifies, and it votes for that as well."""
        self._verifies = every
        try:
            yield
        finally:
            self._verifies = 0

    def _ballot(self, runner: Runner) -> Ballot:
        assert runner.ballot is not None, "a plan that ranks vote on"
        return replace(runner.ballot, verifies=self._verifies) if self._verifies else runner.ballot


def _rewritten_by(runner: Runner) -> Shards | None:
    """What takes over the values that users have written, once ranks have voted on the runner's plan."""
    return None if runner.executor.program.has_two_halves else runner.executor.shards
