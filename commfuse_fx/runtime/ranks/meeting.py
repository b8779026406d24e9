"""Meetings of ranks outside of steps: each learns what the others have, and whether one of them has failed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from commfuse_fx.errors import CollectiveError, PeerFailedError
from commfuse_fx.runtime.ranks.agreement import Agreement
from commfuse_fx.runtime.ranks.joining.world import world_timeout
from commfuse_fx.support.objects import exchange_objects


class Meeting:
    """A meeting exchanges objects between all ranks, over a Gloo group of its own.

    A thread beside that of the steps may hold it: what is sent here never mixes with votes and gradients. A rank that
    leaves is noticed as in a step.

    agreement: that of the step. None for a world of one rank, which meets nobody. All ranks make their meetings
        together.
    """

    def __init__(self, agreement: Agreement | None) -> None:
        self._distress = None if agreement is None else agreement.distress
        self._group = None if agreement is None else dist.new_group(backend="gloo", timeout=world_timeout())
        self.rank = 0 if agreement is None else agreement.rank
        self.size = 1 if agreement is None else dist.get_world_size()
        self.has_failed_alike = False
        """Whether all ranks have just raised an error of which all of them know."""

    def agree(self, what: str, error: Exception | None, mine: Any = None) -> list[Any]:
        """What each rank has, by rank, if none of them has failed. Otherwise all raise.

        what: they do, for messages. error: this rank's, which it raises. The others raise PeerFailedError, which quotes
        it. Raises CollectiveError where a rank has died or does not come.
        """
        text = "" if error is None else f"{type(error).__name__}: {error}"
        everybody: list[tuple[str, Any]] = self._exchange(what, (text, mine))
        failed = [f"rank {rank}: {said}" for rank, (said, _) in enumerate(everybody) if said]
        self.has_failed_alike = bool(failed)
        if error is not None:
            raise error
        if failed:
            raise PeerFailedError(f"another rank failed in {what}, so nothing has changed on any. {'; '.join(failed)}")
        return [each for _, each in everybody]

    def _exchange(self, what: str, mine: Any) -> list[Any]:
        if self._group is None:
            return [mine]
        try:
            return exchange_objects(mine, self._gather)
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank}: {what} failed. Another rank has died, is stuck or left early; its own output says "
                f"why. [{type(error).__name__}: {error}]"
            ) from error

    def _gather(self, given: torch.Tensor) -> list[torch.Tensor]:
        assert self._distress is not None, "several ranks"
        rows = [torch.empty_like(given) for _ in range(self.size)]
        self._distress.heed(dist.all_gather(rows, given, group=self._group, async_op=True)).wait()
        return rows
