"""What the plans of a search are called where people compare them."""

from __future__ import annotations

from commfuse_fx.cost.numbers import in_bytes
from commfuse_fx.passes.distribute.divide import Divide
from commfuse_fx.planning.variants.attempts import Attempt
from commfuse_fx.sharding.search.exposure import Exposure

DATA_PARALLEL = "data parallel"


def is_data_parallel(made: Attempt) -> bool:
    """Whether the plan divides the batch, and what marks ask for, alone."""
    return not any(isinstance(each, Divide) and each.searched for each in made.pipeline.passes)


def plan_name(made: Attempt) -> str:
    """By what the search counts, what it saves, and the level of the parallel optimizer."""
    divide = next(each for each in made.pipeline.passes if isinstance(each, Divide))
    level = f", parallel optimizer level {divide.level}" if divide.level else ""
    if not divide.searched:
        return f"{DATA_PARALLEL}{level}"
    counted = f" that counts {Exposure.parse(divide.exposed).by_axis()}" if divide.exposed else ""
    saving = f", saving {in_bytes(divide.saving)}" if divide.saving else ""
    where = " inside of data parallel" if divide.inner else ""
    return f"search{where}{counted}{saving}{level}"
