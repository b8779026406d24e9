"""One plan for all compilations of equal programs with equal options: on ranks planning is most of what tests take.

Why: docs/decisions.md, "Ranks of the tests are forks of two servers, and plan equal programs once".
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.text.write_text import canonical_text
from commfuse_fx.planning import compile_call, planner
from commfuse_fx.planning.compile_call import plan_step as make_plan
from commfuse_fx.planning.pipeline.graph_log import graph_log
from commfuse_fx.planning.request import PassRequest
from commfuse_fx.planning.variants.attempts import OnPlan
from commfuse_fx.planning.variants.compared_plans import Planned

_planned: dict[tuple[Hashable, ...], tuple[Planned, dict[str, Any]]] = {}


def share() -> None:
    """From now on `compile` looks here first."""
    compile_call.plan_step = plan_step
    planner.plan_step = plan_step


def plan_step(
    program: Program, config: CompileConfig, asked: PassRequest | None = None, on_plan: OnPlan | None = None
) -> Planned:
    """In place of `commfuse_fx.planning.compile_call.plan_step`, with its arguments."""
    asked = PassRequest() if asked is None else asked
    if asked.sharding is not None or graph_log() is not None:
        return make_plan(program, config, asked, on_plan=on_plan)
    described = (canonical_text(program), program.mesh, program.params, program.optimizer, config, asked)
    values = tuple((name, id(value)) for name, value in program.constants.items())
    key = (repr(described), repr(program.aux_nest), values, compile_call.variants)
    if key not in _planned:
        constants = program.constants
        planned, pipeline, records = make_plan(program, config, asked, on_plan=on_plan)
        _planned[key] = (planned.copy(), pipeline, records), constants  # which keeps the numbers of `values` taken
        return planned, pipeline, records
    (planned, pipeline, records), _ = _planned[key]
    return replace(planned.copy(), aux_nest=program.aux_nest), pipeline, list(records)
