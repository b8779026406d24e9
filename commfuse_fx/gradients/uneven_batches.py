"""Ranks that have different numbers of batches: in a `Join` context those without take part in what the others send.

Why: docs/decisions.md, "A rank without batches attends the votes of the others".
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import _StopRecomputationError

from commfuse_fx.errors import CommFuseError, PeerFailedError
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.json.read import from_json
from commfuse_fx.ir.json.write import to_json
from commfuse_fx.runtime.execute.wire.answer import answer
from commfuse_fx.runtime.execute.wire.wire import Wire
from commfuse_fx.runtime.ranks.agreement import Agreement
from commfuse_fx.runtime.ranks.ballots import Ballot, Vote, explain_failures
from commfuse_fx.runtime.ranks.groups import Groups

_END, _PRICES = "the end of an iteration", "prices of a plan"


@dataclass(frozen=True)
class Roll:
    """active: the ranks that still have batches. is_full: whether all have."""

    active: list[int]
    is_full: bool

    @property
    def source(self) -> int:
        """The rank whose buffers and programs count."""
        return self.active[-1] if self.active else 0


class UnevenBatches:
    """Knows which ranks still have batches, and lets the others answer them with zeros.

    Every forward begins with a roll. Ranks without batches then attend the votes of the others, which say what is sent
    next, until these vote for the end of the iteration.

    roll: None outside of a `Join` context.
    mean_of_active: whether means divide by the ranks that still have batches.
    owes: whether other ranks wait for this one's vote: on what it sends, or on the end of the iteration.
    """

    def __init__(
        self,
        agreement: Agreement,
        device: Callable[[], torch.device],
        in_step: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.roll: Roll | None = None
        self.mean_of_active = False
        self.owes = False
        self._agreement = agreement
        self._device = device
        self._in_step = in_step
        # What ranks without batches have been told, by signature: the same on all ranks.
        self._texts: dict[int, str] = {}
        self._programs: dict[int, Program] = {}

    def enter(self, mean_of_active: bool) -> None:
        """A `Join` context begins, on all ranks."""
        self.mean_of_active = mean_of_active
        self._texts.clear()
        self._programs.clear()

    def leave(self) -> None:
        """Calls are outside of a `Join` context."""
        self.roll, self.owes = None, False

    @property
    def are_absent(self) -> bool:
        """Whether some rank has no more batches."""
        return self.roll is not None and not self.roll.is_full

    @property
    def source(self) -> int | None:
        """The rank whose buffers count; None outside of a `Join` context."""
        return None if self.roll is None else self.roll.source

    @property
    def scale(self) -> float:
        """What a mean over all ranks has to be multiplied with."""
        if self.roll is None or not self.mean_of_active:
            return 1.0
        return dist.get_world_size() / len(self.roll.active)

    def begin(self, syncs: bool) -> None:
        """Take the roll before a forward. syncs: whether its backward reduces gradients.

        Raises PeerFailedError if a rank says that it cannot go on.
        """
        self._take_roll(is_active=True)
        self.owes = syncs or self.are_absent

    def check(self) -> None:
        """Raises CommFuseError where gradients would be reduced that no rank without batches expects."""
        if self.are_absent and not self.owes:
            raise CommFuseError(
                f"rank {self._agreement.rank} runs a second backward after one forward, in a join() context in which "
                "another rank has no more batches: that rank waits for the next forward. Add up the losses, and call "
                "backward() once for each forward"
            )

    def tell(self, signature: int, program: Program) -> None:
        """The ranks have voted for this program. Those that do not run it themselves may not know it.

        Raises CommFuseError, on all ranks, for a program that cannot be written as JSON.
        """
        assert self.roll is not None, "some rank is absent"
        if signature in self._texts:
            return
        text = error = None
        if self._agreement.rank == self.roll.source:
            try:
                text = to_json(program)
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
        self._learn(signature, (text, error))

    def _learn(self, signature: int, mine: tuple[str | None, str | None]) -> None:
        assert self.roll is not None, "some rank is absent"
        text, error = self._agreement.from_all(mine)[self.roll.source]
        if error is not None:
            raise CommFuseError(
                f"rank {self.roll.source} cannot tell ranks without batches what it sends [{error}]: give all ranks as "
                "many batches (drop_last)"
            )
        self._texts[signature] = text

    def end(self) -> None:
        """Nothing more is sent for this forward."""
        owes, self.owes = self.owes, False
        if owes and self.are_absent:
            with self._in_step():
                self._vote(_END)

    def agree_on_end(self) -> None:
        """Vote that nothing more is sent in this backward.

        Raises PlanMismatchError, on every rank, where another rank is about to send something.
        """
        if self.roll is None:
            with self._in_step():
                self._vote(_END)

    def shared(self, mine: Any) -> Any:
        """The object of rank 0, or of a rank that still has batches. The active ranks call this together."""
        if not self.are_absent:
            return self._agreement.from_rank_0(mine)
        with self._in_step():
            self._vote(_PRICES)
            return self._agreement.from_all(mine)[self.source_of_prices]

    @property
    def source_of_prices(self) -> int:
        """The rank whose object `shared` returns."""
        return self.roll.source if self.roll is not None and self.are_absent else 0

    def fail(self, error: Exception) -> None:
        """Where ranks wait for the next forward: tell them that it does not come."""
        self._take_roll(is_active=True, failure=f"{type(error).__name__}: {error}")

    def attend(self, groups: Groups | None) -> None:
        """On a rank without batches: take part in one iteration of the others.

        Raises PlanMismatchError or PeerFailedError as the other ranks do, and CollectiveError.
        """
        self._take_roll(is_active=False)
        end, prices = self._ballot(_END).signature, self._ballot(_PRICES).signature
        while True:
            with self._in_step():
                signature = self._agreement.attend()
                if signature == end:
                    return
                if signature == prices:
                    self._agreement.from_all(None)
                    continue
                self._answer(signature, groups)

    def _answer(self, signature: int, groups: Groups | None) -> None:
        roll = self.roll
        assert roll is not None, "it has been taken"
        if signature not in self._texts:
            self._learn(signature, (None, None))
        if signature not in self._programs:
            self._programs[signature] = from_json(self._texts[signature], any_op=True)
        program = self._programs[signature]
        wire = Wire(program, groups, self._agreement.rank)
        wire.distress, wire.buffers_from = self._agreement.distress, roll.source
        answer(program, wire, self._device())

    def _vote(self, what: str) -> None:
        ballot = self._ballot(what)
        self._agreement.cast(Vote(ballot.signature))
        self._agreement.settle(ballot)

    def _ballot(self, what: str) -> Ballot:
        return Ballot(self._agreement.number, "", "", "", what, in_common=True, is_module=True)

    def _take_roll(self, is_active: bool, failure: str = "") -> None:
        world, device = dist.get_world_size(), self._device()
        told = torch.zeros(world + 1, dtype=torch.int64, device=device)
        told[self._agreement.rank], told[world] = int(is_active), int(bool(failure))
        dist.all_reduce(told)
        *ranks, failed = told.tolist()
        active = [rank for rank, count in enumerate(ranks) if count]
        self.roll = Roll(active, len(active) == world)
        if failed:
            self.owes = False
            messages = self._agreement.from_all(failure)
            if not failure:
                raise PeerFailedError(explain_failures(messages))


_KNOWN = "_commfuse_ranks_know"


def note_known(error: BaseException) -> None:
    """The other ranks have been told of this error, or raise one of their own for the same reason."""
    with suppress(AttributeError):
        setattr(error, _KNOWN, True)


def is_known(error: BaseException) -> bool:
    """Whether the other ranks know of this error, or need not: activation checkpointing ends a forward by one."""
    return isinstance(error, _StopRecomputationError) or getattr(error, _KNOWN, False)
