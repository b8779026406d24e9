"""The passes that a compile runs: those of the table that run in its situation."""

from __future__ import annotations

from dataclasses import replace

from commfuse_fx.passes.declaration import Pass, PassContext, Situation
from commfuse_fx.planning.pipeline.pass_table import TABLE
from commfuse_fx.planning.pipeline.pipeline import PassPipeline


def build_pipeline(situation: Situation, context: PassContext | None = None) -> PassPipeline:
    """The passes of one compile, in order. context: by default that of the configured cluster."""
    context = PassContext.of(situation.config) if context is None else context
    made = (
        each.when(situation)
        for passes in TABLE.values()
        for each in passes
        if not (each.needs_sizes and situation.by_autograd)
    )
    passes = tuple(item for item in made if item is not None)
    return PassPipeline(passes, context=context, variant=situation.variant)


def skipped_passes(situation: Situation) -> list[type[Pass]]:
    """The passes that do not run because autograd computes, and would run otherwise."""
    if not situation.by_autograd:
        return []
    compiled = replace(situation, by_autograd=False)
    needing = (each for passes in TABLE.values() for each in passes if each.needs_sizes)
    return [each for each in needing if each.when(compiled) is not None]
