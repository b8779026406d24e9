"""The program of a plan before its collectives are fused, its nodes moved and its memory laid out."""

from __future__ import annotations

from itertools import takewhile

from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import Pass
from commfuse_fx.passes.rewrite.lower_average import LowerAverage
from commfuse_fx.planning.pipeline.pass_table import TABLE, UPDATE
from commfuse_fx.planning.pipeline.pipeline import PassPipeline, PassRecord

_DEFINING: tuple[type[Pass], ...] = tuple(
    item for stage in (*takewhile(lambda name: name != UPDATE, TABLE), UPDATE) for item in TABLE[stage]
)
"""The passes that say what a step computes, and with which kernels. Those behind them say how."""

_SUMMING = ("prepare", "fuse", "schedule")
"""Stages whose passes reorder no sums but those over ranks."""


def before_fusion(captured: Program, pipeline: PassPipeline) -> Program:
    """What a plan computes, made of what was captured: one collective for each gradient, each waited for at once.

    captured: is changed. pipeline: that of the plan.
    """
    passes = [item for item in pipeline.passes if isinstance(item, (*_DEFINING, LowerAverage))]
    given = [fact for item in passes for fact in item.requires]
    PassPipeline(tuple(passes), tuple(given), pipeline.context).run(captured)
    return captured


def keeps_bits_of_two_ranks(pipeline: PassPipeline, records: list[PassRecord]) -> bool:
    """Whether the plan computes the bits of `before_fusion` where sums over ranks have two terms at most."""
    modified = [record.name for record in records if record.modified]
    moved = {item.name: stage for stage in TABLE for item in TABLE[stage] if stage in _SUMMING}
    late = [item for item in pipeline.passes if not isinstance(item, _DEFINING) and item.name in modified]
    return all(item.numerics == "bitwise" or item.name in moved for item in late)
