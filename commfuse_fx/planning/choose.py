"""Make several whole plans of one step, and keep the one that simulates fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from commfuse_fx.cost.model import CostModel
from commfuse_fx.cost.numbers import EQUAL
from commfuse_fx.ir.builder import aten
from commfuse_fx.ir.collectives import is_start, is_wait
from commfuse_fx.ir.deferred import is_deferred
from commfuse_fx.ir.meta import info
from commfuse_fx.ir.program import Program
from commfuse_fx.passes.declaration import Pass, PassContext
from commfuse_fx.passes.fuse.flatten_storage import FlattenStorage
from commfuse_fx.passes.fuse.fuse_collectives import Buckets, FuseCollectives, buckets_of
from commfuse_fx.passes.rewrite.resend_rows import ResendRows
from commfuse_fx.passes.schedule.postpone_gradients import PostponeGradients
from commfuse_fx.passes.schedule.schedule import TooLittleMemory
from commfuse_fx.planning.pipeline import PassPipeline, PassRecord, Watcher
from commfuse_fx.simulate.rounds import play

WORTHWHILE = 1e-3
"""What a further search for buckets has to promise to be made: so much of the step's time, at best."""

_OPTIONAL = (ResendRows.name, PostponeGradients.name)
"""Passes with which a plan is made, and without."""

Planned = tuple[Program, PassPipeline, list[PassRecord]]
"""A final program, the passes that made it, and what they did."""

Check = Callable[[Program, str], None]


class _Decided(NamedTuple):
    """What a plan follows from: the members of its buckets, those that have storage of their own, and other passes."""

    buckets: Buckets
    stored: Buckets
    passes: tuple[Pass, ...]


def fastest(
    program: Program,
    pipelines: Sequence[PassPipeline],
    fixed: Sequence[PassPipeline],
    context: PassContext,
    most: int,
    check: Check | None = None,
    watcher: Watcher | None = None,
) -> Planned:
    """Run the passes that all pipelines begin with once, the others each on a copy, and take the fastest result; of
    equally fast ones the first.

    Once a plan takes no longer than what it computes, no more `pipelines` are run. Then follow the `fixed` ones, which
    search for no buckets: those that are not the same as a plan that was made, until there are `most` plans, or one
    that no other can beat.
    Raises TooLittleMemory if no plan fits.
    """
    if len(pipelines) + len(fixed) == 1:
        return program, pipelines[0], pipelines[0].run(program, check, watcher=watcher)
    shared = _shared_passes([*pipelines, *fixed])
    begun = pipelines[0].run(program, check, part=slice(shared), watcher=watcher)
    costs = context.costs
    least = _least_seconds(program, costs)
    seen: list[_Decided] = []
    planned: list[tuple[float, Planned]] = []
    failed: list[TooLittleMemory] = []

    @cache
    def alone(flatten: FlattenStorage) -> list[tuple[str, ...]]:
        """The gradients that it would give storage if none were fused."""
        return [details.members for start in flatten.alone(program) if (details := info(start).collective)]

    def decided(buckets: Buckets, others: Sequence[Pass]) -> _Decided:
        own = dict.fromkeys(buckets)
        stored = [
            bucket for each in others if isinstance(each, FlattenStorage) for bucket in alone(each) if bucket in own
        ]
        return _Decided(buckets, tuple(stored), tuple(each for each in others if not isinstance(each, FlattenStorage)))

    def plan(pipeline: PassPipeline) -> float:
        """Seconds for which the core is busy in a step; 0 where there is no such plan."""
        _, after, others = _parts(pipeline, shared)
        own = program.copy()
        first = pipeline.run(own, check, part=slice(shared, after), watcher=watcher)
        if any(record.name in _OPTIONAL and not record.modified for record in first):
            return 0.0  # the same as without that pass
        seen.append(decided(buckets_of(own), others))
        try:
            rest = pipeline.run(own, check, part=slice(after, None), watcher=watcher)
        except TooLittleMemory as error:
            failed.append(error)
            return 0.0
        seconds, busy = _predicted_seconds(own, costs)
        planned.append((seconds, (own, pipeline, [*begun, *first, *rest])))
        return busy

    for pipeline in pipelines:
        busy = plan(pipeline)
        if busy and planned[-1][0] <= busy * (1 + WORTHWHILE):
            break
    for pipeline in fixed:
        if len(seen) >= most or any(seconds <= least * (1 + EQUAL) for seconds, _ in planned):
            break
        fuse, _, others = _parts(pipeline, shared)
        if decided(fuse.buckets(program), others) not in seen:
            plan(pipeline)
    if not planned:
        raise min(failed, key=lambda error: error.needed)
    best = min(planned, key=lambda each: each[0])[1]
    _keep_reason(best[0], [program for _, (program, _, _) in planned])
    return best


def _keep_reason(program: Program, planned: Sequence[Program]) -> None:
    """Say why nothing is deferred, whichever plan is taken."""
    found = [note for each in planned for note in each.notes if note.topic == "across_steps"]
    if found and found[0] not in program.notes and not any(is_deferred(node) for node in program.graph.nodes):
        program.notes.append(found[0])


def _parts(pipeline: PassPipeline, shared: int) -> tuple[FuseCollectives, int, tuple[Pass, ...]]:
    """The pass that makes buckets, the place of the pass after it, and what is not shared beside it."""
    for place, item in enumerate(pipeline.passes):
        if isinstance(item, FuseCollectives):
            return item, place + 1, (*pipeline.passes[shared:place], *pipeline.passes[place + 1 :])
    raise AssertionError("every pipeline fuses collectives")


def _shared_passes(pipelines: Sequence[PassPipeline]) -> int:
    count = 0
    for passes in zip(*(pipeline.passes for pipeline in pipelines), strict=False):
        if isinstance(passes[0], FuseCollectives) or any(each != passes[0] for each in passes):
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
