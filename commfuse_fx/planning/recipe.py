"""The passes that a compile runs: those of the table that run in its situation."""

from __future__ import annotations

from commfuse_fx.passes.declaration import PassContext, Situation
from commfuse_fx.planning.pass_table import TABLE
from commfuse_fx.planning.pipeline import PassPipeline


def build_pipeline(situation: Situation, context: PassContext | None = None) -> PassPipeline:
    """The passes of one compile, in order. context: by default that of the configured cluster."""
    context = PassContext.of(situation.config) if context is None else context
    made = (each.when(situation) for passes in TABLE.values() for each in passes)
    return PassPipeline(tuple(item for item in made if item is not None), context=context)
