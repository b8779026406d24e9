"""Make several whole plans of one step, and keep the one that simulates fastest.

Why: docs/decisions.md, "Plans are compared to the end, and the fastest by simulation is taken".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commfuse_fx.cost.model import CostModel
from commfuse_fx.cost.numbers import EQUAL
from commfuse_fx.cost.too_little_memory import TooLittleMemory
from commfuse_fx.ir.core.builder import aten
from commfuse_fx.ir.core.collectives import is_start, is_wait
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import Pass, PassContext
from commfuse_fx.planning.pipeline.pipeline import PassPipeline, Watcher
from commfuse_fx.planning.variants.attempts import Attempt, OnPlan
from commfuse_fx.planning.variants.compared_plans import Check, ComparedPlans, Planned
from commfuse_fx.support.logs import logger

_PLAN = logger("plan")

STOPPED = ("search", "interrupted")
"""Topic and subject of the note on a plan that is the fastest one of those made before an interrupt."""


Further = Callable[[Sequence[Attempt]], Sequence[PassPipeline]]
"""What to plan next, by the plans that were made; nothing where these will do."""


def fastest(
    program: Program,
    pipelines: Sequence[PassPipeline],
    fixed: Sequence[PassPipeline],
    context: PassContext,
    most: int,
    check: Check | None = None,
    watcher: Watcher | None = None,
    on_plan: OnPlan | None = None,
    may_stop: bool = False,
    further: Further | None = None,
    soonest: int = 0,
) -> Planned:
    """Run the passes that all pipelines begin with once, the others each on a copy, and take the fastest result; of
    equally fast ones the first.

    Once a plan takes no longer than what it computes, no more `pipelines` are run. Then follow the `fixed` ones, which
    search for no buckets: those that are not the same as a plan that was made, until there are `most` plans, or one
    that no other can beat.

    on_plan: told of each plan. may_stop: an interrupt (Ctrl-C) ends the planning once there is a plan. The next one
        is an interrupt as usual.
    further: asked for more pipelines once those that are known have run, until it has none. All of `pipelines` are run
        then. Where the first pass in which they differ makes a graph that an earlier one has made, that plan stands for
        both.
    soonest: the number of the pipeline that is run first, as its plan is there soon. It does not count as the first one
        for that.
    Raises TooLittleMemory if no plan fits.
    """
    tell = on_plan or (lambda made: None)
    if len(pipelines) + len(fixed) == 1:
        try:
            records = pipelines[0].run(program, check, watcher=watcher)
        except TooLittleMemory as error:
            tell(Attempt(1, 1, pipelines[0], None, needed=error.needed))
            raise
        tell(Attempt(1, 1, pipelines[0], program))
        return program, pipelines[0], records
    shared = _shared_passes([*pipelines, *fixed])
    begun = pipelines[0].run(program, check, part=slice(shared), watcher=watcher)
    plans = max(len(pipelines), min(len(pipelines) + len(fixed), most)) if further is None else most
    made = ComparedPlans(program, begun, context.costs, plans, check, watcher, tell, finds_again=further is not None)
    stopped = ""
    try:
        for position in sorted(range(len(pipelines)), key=lambda each: each != soonest):
            if made.plan(pipelines[position], position) and further is None:
                break
        while further is not None and (more := further(made.attempts)):
            for pipeline in more:
                made.plan(pipeline)
        least = _least_seconds(program, context.costs)
        for pipeline in fixed:
            if made.count >= most or made.least <= least * (1 + EQUAL):
                break
            if not made.has_outcomes_of(pipeline):
                made.plan(pipeline)
    except KeyboardInterrupt:
        if not (may_stop and made.has_any):
            raise
        stopped = f"planning ended after {made.count} of at most {plans} plans; the fastest of these is taken"
        _PLAN.warning("interrupted: %s", stopped)
    best = made.best()
    if stopped:
        best[0].note(*STOPPED, stopped)
    return best


def _shared_passes(pipelines: Sequence[PassPipeline]) -> int:
    """How many passes are the same in all plans and decide nothing but their options."""
    count = 0
    for passes in zip(*(pipeline.passes for pipeline in pipelines), strict=False):
        first = passes[0]
        if type(first).outcome is not Pass.outcome or any(each != first for each in passes):
            break
        count += 1
    return count


def _least_seconds(program: Program, costs: CostModel) -> float:
    """Of the compute of a step, whatever its buckets and its order: without casts, some of which buckets save."""
    nodes = [node for node in program.graph.nodes if not is_start(node) and not is_wait(node)]
    needed = (node for node in nodes if node.target is not aten._to_copy.default)
    return costs.step_overhead + sum(map(costs.compute_seconds, needed))
