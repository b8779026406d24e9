"""The order of the passes, and one compile from a call's arguments to a final program."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import fx, nn

from commfuse_fx.capture.build import capture
from commfuse_fx.capture.loss import LossFn
from commfuse_fx.capture.tree import Structure
from commfuse_fx.common_costs import Seconds, common_costs
from commfuse_fx.config import CompileConfig
from commfuse_fx.cost.model import CostModel
from commfuse_fx.cost.rounds import play
from commfuse_fx.cost.source import cost_model
from commfuse_fx.gc_pause import no_garbage_collection
from commfuse_fx.inspect.watch import graph_log
from commfuse_fx.ir.collectives import is_start, is_wait
from commfuse_fx.ir.mesh import Mesh
from commfuse_fx.ir.meta import CollectiveInfo, info
from commfuse_fx.ir.program import OptimizerInfo, Program
from commfuse_fx.ir.text import canonical_text
from commfuse_fx.ir.verify import verify
from commfuse_fx.lowered import Snapshot
from commfuse_fx.passes.channels_last import ChannelsLast
from commfuse_fx.passes.counter_random import CounterRandom
from commfuse_fx.passes.divide import Divide, Layouts
from commfuse_fx.passes.draw_masks import DrawMasks
from commfuse_fx.passes.flatten_storage import FlattenStorage
from commfuse_fx.passes.fuse_collectives import FuseCollectives
from commfuse_fx.passes.keep_gradients import KeepGradients
from commfuse_fx.passes.lower_average import LowerAverage
from commfuse_fx.passes.lower_redistributions import LowerRedistributions
from commfuse_fx.passes.lower_user_collectives import LowerUserCollectives
from commfuse_fx.passes.overlap import Overlap
from commfuse_fx.passes.postpone_gradients import PostponeGradients
from commfuse_fx.passes.range_lookups import RangeLookups
from commfuse_fx.passes.reduce_gradients import ReduceGradients
from commfuse_fx.passes.reinplace import Reinplace
from commfuse_fx.passes.schedule import Schedule, TooLittleMemory
from commfuse_fx.passes.simplify import Simplify
from commfuse_fx.passes.slice_full_batch import SliceFullBatch
from commfuse_fx.passes.split_updates import SplitUpdates
from commfuse_fx.passes.stream_buckets import StreamBuckets
from commfuse_fx.passes.update_parameters import UpdateParameters
from commfuse_fx.passes.weight_gradients import WeightGradients
from commfuse_fx.pipeline import Pass, PassPipeline, PassRecord, Watcher
from commfuse_fx.sharding.marks import Marks
from commfuse_fx.sharding.resolve import resolve_marks

PLANS = ((2_500, 5), (3_500, 4), (5_000, 3), (7_000, 2))
"""How many variants are planned to the end and compared, for graphs of up to so many nodes; a single one above."""

AMPLE = 1.25
"""How much compute is put behind the last gradient across steps, in parts of what its all_reduce takes: enough also
where that shares the wire with another one, or a step computes faster than usual."""

WORTHWHILE = 1e-3
"""What a further plan has to promise to be made: so much of the step's time, at best."""


@dataclass(frozen=True)
class Sharding:
    """What dividing a step takes besides its graph.

    batch_ways: by how many ranks the batch of the captured graph is larger than the one that a rank is handed.
    local_parameters: every rank keeps its part of a parameter; fixed: the layouts that an earlier graph of the same
    step has decided, or None.
    """

    marks: Marks
    batch_ways: int = 1
    local_parameters: bool = False
    fixed: Layouts | None = None


class OtherBatch(Exception):
    """The marks that came to light in the graph divide the batch by another number of ranks than was assumed."""

    def __init__(self, ways: int) -> None:
        super().__init__(ways)
        self.ways = ways


def batch_ways(marks: Marks, mesh: Mesh, config: CompileConfig) -> int:
    """By how many ranks the batch is divided, as far as the marks that are known before capture say."""
    graph = fx.Graph()
    nothing = Program(graph, mesh, config, {}, {}, True, graph.output(()))
    resolved = resolve_marks(marks, nothing)
    return prod(resolved.mesh.size(axis) for axis in resolved.data_axes)


@dataclass(frozen=True)
class Variant:
    """One way to plan a step.

    across_steps: communication may run on into the next one. postponed: this part of the last gradient's all_reduce is
    covered by compute that can wait, which stands behind it (0: nothing is moved): within a step that of the gradients
    just before it, across steps that of the last layers.
    """

    across_steps: bool = False
    postponed: float = 0.0


def variants(config: CompileConfig, nodes: int) -> list[Variant]:
    """What to make and compare for a graph of so many nodes, the most promising first: of equally fast ones the first
    is taken."""
    found = [Variant(), Variant(postponed=1.0)]
    if config.across_steps:
        ample, half = (Variant(across_steps=True, postponed=part) for part in (AMPLE, 0.5))
        found = [Variant(across_steps=True), ample, *found, half]
    if not config.comm_fusion.is_optimal:
        found = [each for each in found if not each.postponed]
    if config.schedule == "none":
        return found[:1]
    return found[: next((count for most, count in PLANS if nodes <= most), 1)]


def build_pipeline(
    config: CompileConfig,
    mesh: Mesh,
    sliced_inputs: Sequence[str] = (),
    flat_updates: bool = True,
    variant: Variant | None = None,
    sharding: Sharding | None = None,
    costs: CostModel | None = None,
) -> PassPipeline:
    """The passes of one compile, in order. `sliced_inputs`: tensors that full_batch cuts, or those that have the batch
    as their first dimension where `sharding` says how the step is divided. `variant` and `costs`: by default as the
    configuration says."""
    variant = Variant(config.across_steps) if variant is None else variant
    if costs is None and config.plans_by_cost:
        costs = cost_model(config.cluster)
    passes: list[Pass] = [Simplify()]
    passes += _divided(config, sliced_inputs, sharding) if sharding else _data_parallel(config, mesh, sliced_inputs)
    passes.append(UpdateParameters())
    if costs is not None and variant.postponed:
        passes.append(PostponeGradients(costs, last_layers=variant.across_steps, part=variant.postponed))
    passes += [
        FuseCollectives(config.comm_fusion, costs, variant.across_steps),
        FlattenStorage(flat_updates, singles=costs is not None),
        SplitUpdates(variant.across_steps),
        LowerAverage(),
    ]
    if costs is not None and config.schedule != "none":
        passes.append(Schedule(costs, config.memory_limit, variant.across_steps))
    elif config.schedule != "none":
        passes.extend((Overlap(), StreamBuckets()))
    passes.append(KeepGradients())
    passes.append(Reinplace())
    return PassPipeline(tuple(passes))


def _data_parallel(config: CompileConfig, mesh: Mesh, sliced_inputs: Sequence[str]) -> list[Pass]:
    group = None if config.parallel_mode == "stand_alone" else mesh.all_axes
    convolutions: list[Pass] = [ChannelsLast(), WeightGradients()] if torch.backends.mkldnn.is_available() else []
    return [
        SliceFullBatch(tuple(sliced_inputs), mesh.all_axes),
        LowerUserCollectives(),
        *convolutions,
        # A rank that is alone draws what eager execution draws.
        *([DrawMasks()] if group is not None and mesh.world > 1 else []),
        ReduceGradients(
            group,
            mean=config.gradients_mean,
            fp32=config.gradient_fp32_sync,
            honour_layerwise=config.parallel_mode == "hybrid_parallel",
        ),
    ]


def _divided(config: CompileConfig, batch: Sequence[str], sharding: Sharding) -> list[Pass]:
    divide = Divide(
        sharding.marks,
        tuple(batch),
        local_inputs=not config.full_batch,
        local_parameters=sharding.local_parameters,
        fixed=sharding.fixed,
    )
    return [RangeLookups(), CounterRandom(), divide, LowerRedistributions()]


@dataclass
class Compiled:
    """The final program, the program as captured (to replay the passes from), and what it cost.

    voted: of a step that several ranks run, the text of what was captured, without and with what depends on the batch.
    """

    program: Program
    captured: Program | None
    pipeline: PassPipeline
    records: list[PassRecord]
    capture_seconds: float
    voted: tuple[str, str] | None = None

    def replay(self) -> Mapping[str, Snapshot]:
        """Run the passes again and keep a text after each."""
        assert self.captured is not None
        program = self.captured.copy()
        texts: dict[str, str] = {}
        collectives: dict[str, tuple[CollectiveInfo, ...]] = {}

        def keep(name: str, program: Program) -> None:
            texts[name] = canonical_text(program)
            found = (info(node).collective for node in program.collectives())
            collectives[name] = tuple(details for details in found if details is not None)

        keep("capture", program)
        modified = {record.name: record.modified for record in self.pipeline.run(program, observers=(keep,))}
        return {name: Snapshot(name, modified.get(name, True), texts[name], collectives[name]) for name in texts}


def compile_call(
    model: nn.Module,
    loss_fn: LossFn | None,
    structure: Structure,
    leaves: Sequence[tuple[str, torch.Tensor]],
    mesh: Mesh,
    config: CompileConfig,
    training: bool,
    optimizer: OptimizerInfo | None,
    sliced_inputs: Sequence[str] = (),
    flat_updates: bool = True,
    keep_captured: bool = False,
    sharding: Sharding | None = None,
    common: Seconds | None = None,
) -> Compiled:
    """Capture and transform one call. With COMMFUSE_VERIFY=1 every pass's result is verified.

    common: what nodes count as, for a plan that all ranks have in common, whatever their batches.
    """
    with no_garbage_collection():
        start = time.perf_counter()
        program = capture(model, loss_fn, structure, leaves, mesh, config, training, optimizer)
        seconds = time.perf_counter() - start
        if sharding is not None and sliced_inputs and not config.full_batch:
            resolved = resolve_marks(sharding.marks, program)
            ways = prod(resolved.mesh.size(axis) for axis in resolved.data_axes)
            if ways != sharding.batch_ways:
                raise OtherBatch(ways)
        captured = program.copy() if keep_captured else None
        votes = mesh.world > 1 and config.device_num is None and config.parallel_mode != "stand_alone"
        voted = (canonical_text(program, activations=False), canonical_text(program)) if votes else None
        if (watcher := graph_log()) is not None:
            watcher.after(PassRecord("capture", True, seconds, 0, len(program.graph.nodes)), program)
        program, pipeline, records = plan_step(program, config, sliced_inputs, flat_updates, sharding, common)
    return Compiled(program, captured, pipeline, records, seconds, voted)


def plan_step(
    program: Program,
    config: CompileConfig,
    sliced_inputs: Sequence[str] = (),
    flat_updates: bool = True,
    sharding: Sharding | None = None,
    common: Seconds | None = None,
    watcher: Watcher | None = None,
) -> _Planned:
    """Run the passes of every variant, and take the fastest result: the program, its pipeline, what the passes did.

    common: as for `compile_call`. watcher: sees the passes of all variants; by default the graph log.
    """
    check = verify if os.environ.get("COMMFUSE_VERIFY") == "1" else None

    def pipeline(variant: Variant, costs: CostModel | None) -> PassPipeline:
        return build_pipeline(config, program.mesh, sliced_inputs, flat_updates, variant, sharding, costs)

    found = variants(config, len(program.graph.nodes))
    costs = cost_model(config.cluster) if config.plans_by_cost else None
    if costs is not None and common is not None:
        costs = common_costs(program, pipeline(found[0], costs), costs, common)
    return _fastest(program, [pipeline(variant, costs) for variant in found], costs, check, watcher or graph_log())


_Planned = tuple[Program, PassPipeline, list[PassRecord]]


def _fastest(
    program: Program,
    pipelines: Sequence[PassPipeline],
    costs: CostModel | None,
    check: Callable[[Program, str], None] | None,
    watcher: Watcher | None = None,
) -> _Planned:
    """Run the passes that all pipelines begin with once, the others each on a copy (the last on `program` itself), and
    take the fastest result. No more are made once one is as fast as computing alone."""
    if len(pipelines) == 1:
        return program, pipelines[0], pipelines[0].run(program, check, watcher=watcher)
    assert costs is not None, "nothing else makes several plans"
    shared = _shared_passes(pipelines)
    begun = pipelines[0].run(program, check, part=slice(shared), watcher=watcher)
    computing = _compute_seconds(program, costs)
    planned: list[tuple[float, _Planned]] = []
    failed: list[TooLittleMemory] = []
    for pipeline in pipelines:
        own = program if pipeline is pipelines[-1] else program.copy()
        first = pipeline.run(own, check, part=slice(shared, shared + 1), watcher=watcher)
        if isinstance(pipeline.passes[shared], PostponeGradients) and not first[0].modified:
            continue  # the same as without that pass
        try:
            rest = pipeline.run(own, check, part=slice(shared + 1, None), watcher=watcher)
        except TooLittleMemory as error:
            failed.append(error)
            continue
        seconds, host = _predicted_seconds(own, costs)
        planned.append((seconds, (own, pipeline, [*begun, *first, *rest])))
        if seconds <= (computing + host) * (1 + WORTHWHILE):
            break
    if not planned:
        raise min(failed, key=lambda error: error.needed)
    return min(planned, key=lambda each: each[0])[1]


def _shared_passes(pipelines: Sequence[PassPipeline]) -> int:
    count = 0
    for passes in zip(*(pipeline.passes for pipeline in pipelines), strict=False):
        if any(each != passes[0] for each in passes):
            break
        count += 1
    return count


def _compute_seconds(program: Program, costs: CostModel) -> float:
    """Of a step, whatever its buckets and its order."""
    nodes = (node for node in program.graph.nodes if not is_start(node) and not is_wait(node))
    return costs.step_overhead + sum(costs.compute_seconds(node) for node in nodes)


def _predicted_seconds(program: Program, costs: CostModel) -> tuple[float, float]:
    """Of a step, rounded to nanoseconds (of equally fast plans the first is taken), and of the backend's work on the
    host in it."""
    played = play(program, costs)
    host = sum(piece.transfer.host for pieces in played.pieces.values() for piece in pieces)
    return round(played.ended - played.began, 9), host
