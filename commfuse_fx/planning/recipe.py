"""The passes that a compile runs: those of the table that run in its situation."""

from __future__ import annotations

from dataclasses import replace

from commfuse_fx.cost.model import cost_model
from commfuse_fx.passes.declaration import Situation
from commfuse_fx.planning.pass_table import TABLE
from commfuse_fx.planning.pipeline import PassPipeline


def build_pipeline(situation: Situation) -> PassPipeline:
    """The passes of one compile, in order. Prices that are not given are those of the configured cluster."""
    if situation.costs is None and situation.config.plans_by_cost:
        situation = replace(situation, costs=cost_model(situation.config.cluster))
    made = (each.when(situation) for passes in TABLE.values() for each in passes)
    return PassPipeline(tuple(item for item in made if item is not None))
