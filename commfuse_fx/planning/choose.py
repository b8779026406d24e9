"""Make several whole plans of one step, and keep the one that simulates fastest."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from commfuse_fx.cost.model import CostModel
from commfuse_fx.cost.numbers import EQUAL
from commfuse_fx.cost.too_little_memory import TooLittleMemory
from commfuse_fx.ir.builder import aten
from commfuse_fx.ir.collectives import is_start, is_wait
from commfuse_fx.ir.program import Program
from commfuse_fx.ir.text import canonical_text
from commfuse_fx.passes.declaration import Pass, PassContext
from commfuse_fx.planning.attempts import Attempt, OnPlan
from commfuse_fx.planning.pass_table import TABLE
from commfuse_fx.planning.pipeline import PassPipeline, PassRecord, Watcher
from commfuse_fx.simulate.rounds import play
from commfuse_fx.support.logs import logger

_PLAN = logger("plan")

WORTHWHILE = 1e-3
"""What a further search for buckets has to promise to be made: so much of the step's time, at best."""

Planned = tuple[Program, PassPipeline, list[PassRecord]]
"""A final program, the passes that made it, and what they did."""

Check = Callable[[Program, str], None]

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
    plans = max(len(pipelines), min(len(pipelines) + len(fixed), most)) if further is None else most
    shared = _shared_passes([*pipelines, *fixed])
    begun = pipelines[0].run(program, check, part=slice(shared), watcher=watcher)
    costs = context.costs
    least = _least_seconds(program, costs)
    seen: list[tuple[Hashable, ...]] = []
    planned: list[tuple[float, Planned]] = []
    failed: list[TooLittleMemory] = []
    attempts: list[Attempt] = []
    known: dict[Hashable, Attempt] = {}
    stopped = ""

    def plan(pipeline: PassPipeline) -> float:
        """Seconds for which the core is busy in a step; 0 where there is no such plan."""
        own, records, outcomes, fits = program.copy(), list(begun), _Outcomes(program), True
        graph: Hashable = None
        for number, item in enumerate(pipeline.passes[shared:], shared):
            if fits:
                try:
                    records += pipeline.run(own, check, part=slice(number, number + 1), watcher=watcher)
                except TooLittleMemory as error:
                    failed.append(error)
                    fits = False
            if fits and item.optional and not records[-1].modified:
                return 0.0  # the same as without that pass
            outcomes.add(item, own if fits else None)
            if further is not None and number == shared:
                graph = canonical_text(own), pipeline.passes[number + 1 :]
                if graph in known:
                    attempts.append(replace(known[graph], pipeline=pipeline, is_known=True))
                    return 0.0
        seen.append(outcomes.all)
        seconds, busy = _predicted_seconds(own, costs) if fits else (None, 0.0)
        needed = 0 if fits else failed[-1].needed
        attempts.append(Attempt(len(seen), max(plans, len(seen)), pipeline, own if fits else None, seconds, needed))
        known[graph] = attempts[-1]
        if seconds is not None:
            planned.append((seconds, (own, pipeline, records)))
        tell(attempts[-1])
        return busy

    try:
        for pipeline in pipelines:
            busy = plan(pipeline)
            if further is None and busy and planned[-1][0] <= busy * (1 + WORTHWHILE):
                break
        while further is not None and (more := further(attempts)):
            for pipeline in more:
                plan(pipeline)
        for pipeline in fixed:
            if len(seen) >= most or any(seconds <= least * (1 + EQUAL) for seconds, _ in planned):
                break
            foreseen = _Outcomes(program)
            for item in pipeline.passes[shared:]:
                foreseen.add(item, None)
            if foreseen.all not in seen:
                plan(pipeline)
    except KeyboardInterrupt:
        if not (may_stop and planned):
            raise
        stopped = f"planning ended after {len(seen)} of at most {plans} plans; the fastest of these is taken"
        _PLAN.warning("interrupted: %s", stopped)
    if not planned:
        raise min(failed, key=lambda error: error.needed)
    best = min(planned, key=lambda each: each[0])[1]
    programs = [program for _, (program, _, _) in planned]
    for made in (each for passes in TABLE.values() for each in passes):
        made.keep_notes(best[0], programs)
    if stopped:
        best[0].note(*STOPPED, stopped)
    return best


class _Outcomes:
    """What the passes of a plan decide, those in which plans differ. before: the program that they begin with."""

    def __init__(self, before: Program) -> None:
        self.before = before
        self.all: tuple[Hashable, ...] = ()
        self._known: dict[str, Hashable] = {}

    def add(self, item: Pass, after: Program | None) -> None:
        """after: the program that the pass has made, None where it has not run."""
        found = item.outcome(self.before, after, self._known)
        self.all = (*self.all, found)
        self._known.update(dict.fromkeys(item.ensures, found))


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


def _predicted_seconds(program: Program, costs: CostModel) -> tuple[float, float]:
    """Of a step, rounded to nanoseconds (of equally fast plans the first is taken), and of the core's work in it, that
    of the backend included."""
    played = play(program, costs)
    host = sum(piece.transfer.least_host for pieces in played.pieces.values() for piece in pieces)
    return round(played.ended - played.began, 9), played.compute_seconds + host
