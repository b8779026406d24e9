"""The votes of one step's ranks: on each plan, and once on the parameters' first values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from commfuse_fx.frontends.runners import Runner
from commfuse_fx.planning.planner import Planner
from commfuse_fx.runtime.ranks.agreement import Agreement, checksum
from commfuse_fx.runtime.ranks.ballots import Ballot
from commfuse_fx.runtime.ranks.broadcast import broadcast_parameters


class Voting:
    """Voting is what one step's ranks agree on before they send. is_started: whether all have run a first step."""

    def __init__(self, planner: Planner, agreement: Agreement | None) -> None:
        self.is_started = False
        self._planner = planner
        self._agreement = agreement
        self._checksum = 0
        self._is_between_votes = False

    def start(self, runner: Runner) -> None:
        """Before the first step: agree on the plan, then send or compare the parameters' first values."""
        agreement, config = self._agreement, self._planner.config
        if agreement is None or not runner.executor.has_collectives:
            return  # an evaluation: the first step is still to come
        shared = [
            param.detach()
            for param in self._planner.watch.params.values()
            if not (config.parallel_mode == "hybrid_parallel" and getattr(param, "layerwise_parallel", False))
        ]
        if config.parameter_broadcast:
            self.cast(runner)
            agreement.settle(_ballot(runner))
            agreement.begin_step()
            broadcast_parameters(shared)
            if runner.executor.shards is not None:
                runner.executor.shards.take()
        else:
            self._checksum = checksum(shared)

    def cast(self, runner: Runner, wish: int = 0) -> None:
        """Start the vote on the runner's plan. wish: as in `Agreement.cast`."""
        assert self._agreement is not None
        self._agreement.cast(_ballot(runner).signature, self._checksum, wish=wish)

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
        self.settle(runner)
        return self._agreement.wish

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

    def settle(self, runner: Runner) -> None:
        """Read it, before the first collective. Raises PlanMismatchError or PeerFailedError, on every rank alike."""
        self._settle(_ballot(runner))
        if runner.executor.shards is not None and not runner.executor.program.has_two_halves:
            runner.executor.shards.release()

    def agree_on_forward(self, runner: Runner) -> None:
        """Vote on the forward of a module whose parameters are divided. Raises what `settle` raises."""
        assert self._agreement is not None and runner.forward is not None, "it sends"
        self._agreement.cast(runner.forward.signature, self._checksum)
        self._settle(runner.forward)
        if runner.executor.shards is not None:
            runner.executor.shards.release()

    def _settle(self, ballot: Ballot) -> None:
        assert self._agreement is not None
        self._agreement.settle(ballot)
        # Not before: a step in which a rank failed is not the first step of any rank.
        self.is_started = True
        self._checksum = 0


def _ballot(runner: Runner) -> Ballot:
    assert runner.ballot is not None, "a plan with collectives"
    return runner.ballot
