"""What all ranks of a step do together between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from commfuse_fx.errors import CommFuseError
from commfuse_fx.planning.planner import Planner
from commfuse_fx.runtime.ranks.agreement import Agreement
from commfuse_fx.runtime.ranks.ballots import Ballot, Vote
from commfuse_fx.runtime.ranks.callers import OutOfTurn, lock_of
from commfuse_fx.runtime.ranks.exchange import LONGEST_WAIT
from commfuse_fx.runtime.ranks.joining.world import world_timeout
from commfuse_fx.runtime.ranks.meeting import Meeting


class Together:
    """Lets the ranks of a step do something together between two steps, after a vote on what it is.

    finish: completes the last step. is_lost: whether the last step can no longer be completed.
    """

    def __init__(
        self,
        planner: Planner,
        agreement: Agreement | None,
        finish: Callable[[], None],
        is_lost: Callable[[], bool],
    ) -> None:
        self._planner = planner
        self._agreement = agreement
        self._finish = finish
        self._is_lost = is_lost
        self._meeting: Meeting | None = None

    @contextmanager
    def doing(self, what: str) -> Iterator[Meeting]:
        """Inside of the block all ranks do the same, no step runs, and the last one is complete.

        what: they do. Yields where they meet. Raises PlanMismatchError where other ranks do something else, on every
        rank alike, and what the vote of a step raises.
        """
        agreement, model = self._agreement, self._planner.model
        if agreement is None:
            with lock_of(model):
                self._finish()
                yield self._met()
            return
        meeting: Meeting | None = None
        with agreement.callers.turn(agreement.number):
            agreement.begin_step()
            try:
                with lock_of(model):
                    self._finish()
                self._vote(agreement, what)
                with lock_of(model):
                    meeting = self._met()
                    yield meeting
            except BaseException as error:
                if meeting is None or not meeting.has_failed_alike:
                    agreement.leave_step(error, expected=isinstance(error, Exception), lost=self._is_lost())
                    raise
                agreement.end_step()
                raise
            agreement.end_step()

    def _vote(self, agreement: Agreement, what: str) -> None:
        model = type(self._planner.model).__qualname__
        while True:
            others = agreement.callers.have_others()
            ballot = Ballot(agreement.number, model, what, what, "", others=others, between_steps=what)
            try:
                agreement.cast(Vote(ballot.signature))
                agreement.settle(ballot)
                return
            except OutOfTurn as other:
                let_first(agreement, other.first)
                agreement.begin_step()

    def _met(self) -> Meeting:
        if self._meeting is None:
            self._meeting = Meeting(self._agreement)
        self._meeting.has_failed_alike = False
        return self._meeting

    def release(self) -> None:
        """Let go of the process group."""
        self._meeting = self._agreement = None


def let_first(agreement: Agreement, first: int) -> None:
    """The vote has shown that rank 0 runs this step next: if it is another one, its thread goes first here, too."""
    if first == agreement.number:
        return
    try:
        agreement.callers.let_first(first, agreement.number, min(world_timeout() / 2, LONGEST_WAIT).total_seconds())
    except CommFuseError as error:
        agreement.begin_step()
        agreement.leave_step(error, expected=True)
        raise
