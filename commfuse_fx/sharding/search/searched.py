"""Search the strategies of a step on its mesh axes.

Why: docs/decisions.md, "Sharding propagation counts communication, over the axes that marks name".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from commfuse_fx.cost.model import CostModel
from commfuse_fx.ir.core.program import Program
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.sharding.dividing.axis import Axis
from commfuse_fx.sharding.search.axis_by_axis import axis_by_axis, together
from commfuse_fx.sharding.search.axis_grid import Objective
from commfuse_fx.sharding.search.axis_search import AxisSearch
from commfuse_fx.sharding.search.exposure import Exposure
from commfuse_fx.sharding.search.priced_reads import KnownLayouts
from commfuse_fx.sharding.search.search_proof import SearchProofs, prove

SEARCH = "search"
"""Topic of notes that say what a search has found."""

TOGETHER = 2
"""Axes that are searched together, at most: an op has as many strategies as those on each axis multiply to."""

MARKED = Objective(moved=1 << 20)
"""A parameter lies as its mark says in every use."""

NEGLIGIBLE = 1e-6
"""The part of compute that counts where communication is counted: it decides between strategies that send the same."""


def searched(
    program: Program,
    axes: Sequence[Axis],
    costs: CostModel,
    exposed: str = "",
    saving: int = 0,
    known: KnownLayouts | None = None,
    quick: bool = False,
    proofs: SearchProofs | None = None,
) -> list[Axis]:
    """The axes with the strategies and the placements of parameters that a step takes least time with.

    Those that are pinned already are kept. exposed: the part of the time of collectives that counts, as `Exposure`
    writes it. saving: bytes that a rank is to hold less than with the fastest choice.
    known: what other searches of the same compile have found out. quick: whether the first choice that is found is
    taken, also where it is far from proven to be the cheapest. proofs: where that of this search is added.
    """
    propagates = program.config.propagates
    if propagates:
        search = AxisSearch(program, CostModel(_communication_alone(costs.cluster)), known=known, objective=MARKED)
    else:
        search = AxisSearch(program, costs, exposed, known)
    budget = None if not saving else lambda least, most: max(least, most - saving)
    if len(axes) == 1 or (program.config.search_mode == "dynamic_programming" and len(axes) <= TOGETHER):
        found = search.cheapest(axes, budget) if quick else together(search, axes, budget)
    else:
        found = axis_by_axis(search, axes, budget)
    counted = f" that counts {Exposure.parse(exposed).by_axis()}" if exposed else ""
    kept = f" and {found.nbytes / 2**20:.1f} MiB taken" if saving else ""
    if not propagates:
        program.search_seconds = found.cost
    meaning = " of communication" if propagates else ""
    gap = "nothing proven"
    if found.gap is not None:
        gap = f"no choice takes less than {found.cost * (1 - found.gap) * 1e3:.3f} ms (proven gap {found.gap:.2%})"
    if proofs is not None and len(axes) <= TOGETHER:
        proofs.append(prove(search, axes, found))
    program.note(
        SEARCH,
        ", ".join(axis.group for axis in axes),
        f"{found.cost * 1e3:.3f} ms{meaning} by the prices of the search{counted}{kept}; {found.solver}, {gap}",
    )
    return list(found.axes)


def _communication_alone(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with devices that compute in next to no time."""
    device = cluster.device
    fast = replace(
        device,
        flops={dtype: rate / NEGLIGIBLE for dtype, rate in device.flops.items()},
        memory_bandwidth=device.memory_bandwidth / NEGLIGIBLE,
        op_overhead=0.0,
    )
    return replace(cluster, device=fast)
