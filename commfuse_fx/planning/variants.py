"""The ways to plan one step that are made and compared."""

from __future__ import annotations

from collections.abc import Sequence

from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.passes.declaration import Variant

SEARCHES = ((2_100, 8), (3_500, 5), (5_000, 3), (7_000, 2))
"""How many variants are searched for buckets, for graphs of up to so many nodes; a single one above."""


PLANS = ((1_000, 27), (1_500, 13), (2_100, 9))
"""How many plans are made to the end and compared, for graphs of up to so many nodes; above as many as are searched."""


FIXED_MIB = (64, 25, 4, 1)
"""Sizes of buckets that mode "optimal" is compared with, besides no fusion and all in one."""


ONE_BUCKET_MIB = 1 << 20
"""A size that no model reaches."""


AMPLE = 1.25
"""How much compute is put behind the last gradient across steps, in parts of what its all_reduce takes: enough also
where that shares the wire with another one, or a step computes faster than usual."""


LOOSE = 4.0
"""The same behind rows that are sent again, which take little: so much that updates need not fill all the time."""


SCANT = (0.5, 0.25, 0.75)
"""The same, where what is computed later would be sent too late: a busy wire."""


def variants(config: CompileConfig, nodes: int, may_resend: bool = False) -> list[Variant]:
    """What to make and compare for a graph of so many nodes, the most promising first: of equally fast ones the first
    is taken. Where buckets are searched for, those that any other mode makes follow.

    may_resend: a gradient has a part of which only some rows are not zero. The choices are these:
    across_steps: communication may run on into the next step.
    postponed: this part of the last gradient's all_reduce is covered by compute that can wait, which stands behind it:
        within a step that of the gradients just before it, across steps that of the last layers.
    fused_mib: buckets have this size, where mode "optimal" would search for them; 0: nothing is fused.
    stored: gradients that are reduced alone get storage where that may pay.
    resent: gradients of what is also looked up are sent before the lookups' part is there, and the rows of that once
        more.
    cut_within: buckets are those for a step that waits for all of them at its end.
    """
    plain = Variant()
    within = Variant.of(across_steps=False) if config.across_steps else plain
    found = [within, within.but(postponed=1.0)]
    if config.across_steps:
        ample, *scant = (Variant.of(postponed=part) for part in (AMPLE, *SCANT))
        found = [plain, ample, within, Variant.of(cut_within=True), *scant, found[1]]
    if may_resend and config.comm_fusion.for_kind("all_reduce").mode == "optimal":
        first, second, *more = [each.but(resent=True) for each in found[:3]]
        loose = [first.but(postponed=LOOSE)] if config.across_steps else []
        found = [first, found[0], second, *loose, *more, *found[1:]]
    if not config.comm_fusion.is_optimal:
        found = [each for each in found if not each.get("postponed", 0) and not each.get("cut_within", False)]
    if config.schedule == "none":
        found = found[:1]
    found = found[: _up_to(SEARCHES, nodes, 1)]
    if not config.plans_by_cost or most_plans(nodes) <= len(found):
        return found
    fixed = list(dict.fromkeys((plain, within)))
    if config.schedule != "none":
        fixed.append(within.but(stored=False))
    if not config.comm_fusion.is_optimal:
        return list(dict.fromkeys([*found, *fixed]))
    return [*found, *(each.but(fused_mib=mib) for mib in (ONE_BUCKET_MIB, *FIXED_MIB, 0) for each in fixed)]


def needs_no_search(variant: Variant) -> bool:
    """Whether its buckets follow from a rule."""
    return variant.get("fused_mib", None) is not None or not variant.get("stored", True)


def most_plans(nodes: int) -> int:
    """How many plans are made at most for a graph of so many nodes."""
    return _up_to(PLANS, nodes, _up_to(SEARCHES, nodes, 1))


def _up_to(limits: Sequence[tuple[int, int]], nodes: int, above: int) -> int:
    return next((count for most, count in limits if nodes <= most), above)
