"""Plans by cost follow from what nodes take on one rank, so that ranks with batches of other sizes plan alike.

Why: docs/decisions.md, "Plans by cost follow rank 0's prices where batches differ".
"""

from __future__ import annotations

from commfuse_fx.gradients.uneven_batches import UnevenBatches
from commfuse_fx.planning.planner import Planner
from commfuse_fx.planning.request import Call
from commfuse_fx.planning.variants.shared_prices import Seconds


class PricesOfOneRank:
    """What nodes of a module take on rank 0; in a `Join` context on a rank that still has batches."""

    def __init__(self, planner: Planner, uneven: UnevenBatches, rank: int) -> None:
        self._planner = planner
        self._uneven = uneven
        self._rank = rank
        self._seconds: Seconds | None = None

    def plan_in_common(self, call: Call) -> None:
        """All ranks come here in their first forward; for a model that has changed since, the prices are those of
        then."""
        planner = self._planner
        planner.signature(call)  # looks at the model
        if planner.has_common_plan:
            return
        if self._seconds is None:
            mine = None
            try:
                if self._rank == self._uneven.source_of_prices:
                    mine = planner.seconds_by_name(call)
            finally:
                self._seconds = self._uneven.shared(mine)
        if self._seconds is not None:
            planner.plan_in_common(self._seconds)
