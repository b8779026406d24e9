"""What ranks do that have come to other plans for batches of other sizes.

Why: docs/decisions.md, "Plans by cost follow rank 0's prices where batches differ".
"""

from __future__ import annotations

from commfuse_fx.errors import PlanMismatchError
from commfuse_fx.planning.planner import Planner
from commfuse_fx.planning.request import Call
from commfuse_fx.planning.variants.shared_prices import Seconds
from commfuse_fx.runtime.ranks.agreement import Agreement
from commfuse_fx.support.logs import logger

_PLAN = logger("plan")


def plan_in_common(planner: Planner, agreement: Agreement, call: Call, mismatch: PlanMismatchError) -> None:
    """Batches of other sizes have led to other plans: all ranks plan again, with what nodes take on rank 0.

    Nothing has been sent yet, and all ranks know from the vote that they come here. Raises the mismatch where rank 0
    can offer nothing: strategies that were searched divide one graph, whose ranks have equally many rows.
    """
    _PLAN.info("planning again, with what nodes take on rank 0, since plans differ between ranks: %s", mismatch)
    offered: Seconds | None = None
    try:
        if agreement.rank == 0 and planner.config.parallel_mode != "auto":
            offered = planner.seconds_by_name(call)
    finally:
        seconds = agreement.from_rank_0(offered)
    if seconds is None:
        raise mismatch
    planner.plan_in_common(seconds)
    agreement.begin_step()
