"""One compile, from a call's arguments to a final program."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from commfuse_fx.capture.build import capture
from commfuse_fx.capture.given_gradients import capture_update
from commfuse_fx.capture.guards.reads import Reads
from commfuse_fx.capture.joint import Outputs, capture_joint
from commfuse_fx.capture.torch_parts.this_thread import one_trace_at_a_time
from commfuse_fx.capture.trace.quiet import torch_is_quiet
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.config.parallel_optimizer import LEVELS, SCATTER, ParallelOptimizer
from commfuse_fx.cost.memory import peak_memory
from commfuse_fx.cost.model import cost_model
from commfuse_fx.cost.priced import priced_for
from commfuse_fx.cost.too_little_memory import TooLittleMemory
from commfuse_fx.ir.core.edit import forget_erased
from commfuse_fx.ir.core.meta import forget_others
from commfuse_fx.ir.core.program import SKIPPED, Program
from commfuse_fx.ir.core.verify import verify
from commfuse_fx.ir.text.write_text import canonical_text
from commfuse_fx.passes.declaration import PassContext, Situation, Variant
from commfuse_fx.passes.distribute.divide import note_plan
from commfuse_fx.planning.compiled import Compiled
from commfuse_fx.planning.pipeline.graph_log import graph_log
from commfuse_fx.planning.pipeline.pipeline import PassPipeline, PassRecord, Watcher
from commfuse_fx.planning.pipeline.recipe import build_pipeline, skipped_passes
from commfuse_fx.planning.request import CompileRequest, OtherBatch, PassRequest
from commfuse_fx.planning.variants.attempts import OnPlan
from commfuse_fx.planning.variants.choose import fastest
from commfuse_fx.planning.variants.compared_plans import Check, Planned
from commfuse_fx.planning.variants.shared_prices import common_costs
from commfuse_fx.planning.variants.strategy_rounds import StrategyRounds, has_rounds
from commfuse_fx.planning.variants.variants import most_plans, variants
from commfuse_fx.sharding.dividing.resolve import resolve_marks
from commfuse_fx.sharding.marking.part_ops import has_parts
from commfuse_fx.sharding.marking.traced_parts import BatchParts
from commfuse_fx.solvers.effort import EFFORT
from commfuse_fx.support.gc_pause import no_garbage_collection
from commfuse_fx.support.tracebacks import are_full


def compile_call(request: CompileRequest, reads: Reads | None = None) -> Compiled:
    """Capture and transform one call. With COMMFUSE_VERIFY=1 the captured program and every pass's result are verified.

    reads: takes notes of the Python values that the trace reads.

    Raises OtherBatch where marks in the graph divide the batch by another number of ranks than the request assumes.
    """
    call, mesh, config, asked = request.call, request.mesh, request.config, request.passes
    with one_trace_at_a_time(), no_garbage_collection():
        start = time.perf_counter()
        outputs: Outputs | None = None
        with torch_is_quiet(not are_full()):
            if request.form == "module":
                joint = (request.model, call.structure, call.leaves, mesh, config, reads, request.training)
                program, outputs = capture_joint(*joint)
            elif request.form == "update":
                program = capture_update(request.model, call.leaves, mesh, config, request.optimizer)
            else:
                program = capture(
                    request.model,
                    request.loss_fn,
                    call.structure,
                    call.leaves,
                    mesh,
                    config,
                    request.training,
                    request.optimizer,
                    reads,
                    _batch_of(request),
                )
                outputs = Outputs(program.aux_nest) if config.has_aux else None
        _let_go_of_trace(program)
        seconds = time.perf_counter() - start
        if asked.sharding is not None and asked.sliced_inputs:
            resolved = resolve_marks(asked.sharding.marks, program)
            parts = prod(resolved.mesh.size(axis) for axis in resolved.data_axes)
            if parts != asked.sharding.batch_parts and (not config.full_batch or has_parts(program)):
                raise OtherBatch(parts)
        verify_if_asked(program, "capture")
        program.batch_inputs = tuple(asked.sliced_inputs)
        if asked.sharding is not None:
            program.marks, program.layouts = asked.sharding.marks, asked.sharding.fixed
            program.strategies = asked.sharding.strategies
        captured = program.copy() if request.keep_captured else None
        several = mesh.world > 1 and config.device_num is None and config.parallel_mode != "stand_alone"
        votes = several and request.form == "step"  # ranks of other forms vote on other texts
        voted = (canonical_text(program, activations=False), canonical_text(program)) if votes else None
        if (watcher := graph_log()) is not None:
            watcher.after(PassRecord("capture", True, seconds, 0, len(program.graph.nodes)), program)
        program, pipeline, records = plan_step(program, config, asked, on_plan=request.on_plan)
    return Compiled(program, captured, pipeline, records, seconds, voted, outputs, asked)


def _batch_of(request: CompileRequest) -> BatchParts | None:
    """The batch that marked calls divide with `cross_batch`: that of the tensors whose dimension 0 is the batch."""
    asked = request.passes
    if asked.sharding is None or not asked.sliced_inputs:
        return None
    return BatchParts(dict(request.call.leaves)[asked.sliced_inputs[0]].shape[0], asked.sharding.batch_parts)


def _let_go_of_trace(program: Program) -> None:
    """Free what the trace leaves, a tensor without data per node among it, before passes make as many objects again."""
    forget_others(program.graph)
    forget_erased(program.graph)
    gc.collect(0)


def verify_if_asked(program: Program, after: str) -> None:
    """With COMMFUSE_VERIFY=1, raise VerificationError where an invariant does not hold. after: the program's maker."""
    if (check := _check()) is not None:
        check(program, after)


def _check() -> Check | None:
    return verify if os.environ.get("COMMFUSE_VERIFY") == "1" else None


def _needed_on_levels(
    situation: Situation, program: Program, variant: Variant, context: PassContext
) -> Mapping[int, int]:
    """Bytes that a step takes on higher levels of the parallel optimizer than the one that was asked for."""
    asked = situation.config.parallel_optimizer
    if not situation.can_share_updates(program):
        return {}
    mode = ParallelOptimizer.parse(situation.config.parallel_optimizer_config).mode
    found: dict[int, int] = {}
    for level in LEVELS[: len(LEVELS) if mode == SCATTER else -1]:
        if asked is not None and level <= asked.level:
            continue
        own, changed = program.copy(), situation.of(variant.but(level=level))
        own.config = changed.config
        try:
            build_pipeline(changed, context).run(own)
            found[level] = peak_memory(own)
        except TooLittleMemory as error:
            found[level] = error.needed
    return found


def plan_step(
    program: Program,
    config: CompileConfig,
    asked: PassRequest | None = None,
    watcher: Watcher | None = None,
    on_plan: OnPlan | None = None,
) -> Planned:
    """Run the passes of every variant, and take the fastest result: the program, its pipeline, what the passes did.

    Where strategies are searched and no other rank has to come to the same plan, an interrupt (Ctrl-C) takes the
    fastest plan so far.

    watcher: sees the passes of all variants; by default the graph log. on_plan: told of each plan.
    """
    check = _check()
    asked = PassRequest() if asked is None else asked
    sharding, common = asked.sharding, asked.common

    situation = Situation(
        config,
        program.mesh,
        flat_updates=asked.flat_updates,
        same_batches=common is None,
        local_parameters=sharding is not None and sharding.local_parameters,
        gradients=asked.gradients,
        by_autograd=bool(program.by_autograd),
        by_rules=asked.by_rules,
    )
    if asked.by_rules and config.plans_by_cost:
        program.note("by rules", "buckets", "ranks may come to this graph at other times, so no prices are asked for")
    for name in config.skip_passes:
        program.note(SKIPPED, name, "skip_passes or COMMFUSE_SKIP names it")
    for each in skipped_passes(situation):
        program.note(SKIPPED, each.name, f"it works on what is computed, and {program.by_autograd}")
    context = PassContext.of(config)
    if situation.searches and context.prices is None:
        device = next((param.spec.device for param in program.params.values()), "cpu")
        context = PassContext(cost_model(priced_for(None, device, program.mesh, {})))
    if config.plans_by_cost and common is not None:
        context = PassContext(common_costs(program, build_pipeline(situation), context.costs, common))
    context = replace(context, kept={})
    found = variants(situation, program)

    def build(variant: Variant) -> PassPipeline:
        return build_pipeline(situation.of(variant), context)

    most = EFFORT.plans(len(program.graph.nodes))
    first, fixed, rounds = *([build(each) for each in part] for part in (found.searched, found.fixed)), None
    if has_rounds(situation, program, found.searched):
        most = most_plans(situation, program, len(found.searched))
        rounds = StrategyRounds(situation, program, found.searched, build, context.costs, most)
        first, fixed = rounds.first, []
    is_alone = config.device_num is not None or program.mesh.world == 1
    before = program.copy() if config.memory_limit is not None else None
    try:
        planned = fastest(
            program,
            first,
            fixed,
            context,
            most,
            check,
            watcher or graph_log(),
            on_plan,
            may_stop=situation.searches and is_alone,
            further=rounds,
            soonest=0 if rounds is None else rounds.soonest,
        )
    except TooLittleMemory as error:
        tried = {} if rounds is None else rounds.needed_by_level()
        if len(tried) > 1 or before is None:
            raise error.on_levels(tried, are_tried=True) from None
        needed = _needed_on_levels(situation, before, found.searched[0].but(searched=False), context)
        raise error.on_levels(needed, are_tried=False) from None
    if rounds is not None:
        rounds.report(planned[0])
    note_plan(planned[0], planned[1].variant)
    forget_erased(planned[0].graph)
    return planned
