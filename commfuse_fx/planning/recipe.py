"""The order of the passes, and one compile from a call's arguments to a final program."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import fx, nn

from commfuse_fx.capture.build import capture
from commfuse_fx.capture.loss import LossFn
from commfuse_fx.capture.quiet import torch_is_quiet
from commfuse_fx.capture.reads import Reads
from commfuse_fx.capture.this_thread import one_trace_at_a_time
from commfuse_fx.capture.tree import Structure
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.config.fusion_config import FusionConfig, KindFusion
from commfuse_fx.cost.model import CostModel
from commfuse_fx.inspect.lowered import Snapshot
from commfuse_fx.ir.mesh import Mesh
from commfuse_fx.ir.meta import CollectiveInfo, info
from commfuse_fx.ir.program import OptimizerInfo, Program
from commfuse_fx.ir.text import canonical_text
from commfuse_fx.ir.verify import verify
from commfuse_fx.machine.source import cost_model
from commfuse_fx.passes.distribute.broadcast_buffers import BroadcastBuffers
from commfuse_fx.passes.distribute.counter_random import CounterRandom
from commfuse_fx.passes.distribute.divide import Divide, Layouts
from commfuse_fx.passes.distribute.lower_redistributions import LowerRedistributions
from commfuse_fx.passes.distribute.lower_user_collectives import LowerUserCollectives
from commfuse_fx.passes.distribute.range_lookups import RangeLookups
from commfuse_fx.passes.distribute.reduce_gradients import ReduceGradients
from commfuse_fx.passes.distribute.slice_full_batch import SliceFullBatch
from commfuse_fx.passes.fuse.flatten_storage import FlattenStorage
from commfuse_fx.passes.fuse.fuse_collectives import FuseCollectives
from commfuse_fx.passes.fuse.keep_gradients import KeepGradients
from commfuse_fx.passes.fuse.reinplace import Reinplace
from commfuse_fx.passes.kernels.channels_last import ChannelsLast
from commfuse_fx.passes.kernels.draw_masks import DrawMasks
from commfuse_fx.passes.kernels.weight_gradients import WeightGradients
from commfuse_fx.passes.rewrite.lower_average import LowerAverage
from commfuse_fx.passes.rewrite.resend_rows import ResendRows, may_resend
from commfuse_fx.passes.rewrite.simplify import Simplify
from commfuse_fx.passes.rewrite.split_updates import SplitUpdates
from commfuse_fx.passes.rewrite.update_parameters import UpdateParameters
from commfuse_fx.passes.schedule.gradients_first import GradientsFirst
from commfuse_fx.passes.schedule.overlap import Overlap
from commfuse_fx.passes.schedule.postpone_gradients import PostponeGradients
from commfuse_fx.passes.schedule.schedule import Schedule
from commfuse_fx.passes.schedule.stream_buckets import StreamBuckets
from commfuse_fx.passes.schedule.tile_first_gradient import TileFirstGradient
from commfuse_fx.passes.schedule.vote_first import VoteFirst
from commfuse_fx.planning.choose import Planned, fastest
from commfuse_fx.planning.graph_log import graph_log
from commfuse_fx.planning.pipeline import Pass, PassPipeline, PassRecord, Watcher
from commfuse_fx.planning.shared_prices import Seconds, common_costs
from commfuse_fx.sharding.dividing.resolve import resolve_marks
from commfuse_fx.sharding.marking.marks import Marks
from commfuse_fx.support.gc_pause import no_garbage_collection
from commfuse_fx.support.tracebacks import are_full

SEARCHES = ((2_100, 8), (3_500, 5), (5_000, 3), (7_000, 2))
"""How many variants are searched for buckets, for graphs of up to so many nodes; a single one above."""

PLANS = ((1_000, 27), (1_500, 13), (2_100, 9))
"""How many plans are made to the end and compared, for graphs of up to so many nodes; above as many as are searched."""

FIXED_MIB = (64, 25, 4, 1)
"""Sizes of buckets that mode "optimal" is compared with, besides no fusion and all in one."""

ONE_BUCKET_MIB = 1 << 20
"""A size that no model reaches."""

AMPLE = 1.25
"""How much compute is put behind the last gradient across steps, in parts of what its all_reduce takes: enough also
where that shares the wire with another one, or a step computes faster than usual."""

LOOSE = 4.0
"""The same behind rows that are sent again, which take little: so much that updates need not fill all the time."""

SCANT = (0.5, 0.25, 0.75)
"""The same, where what is computed later would be sent too late: a busy wire."""


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
    just before it, across steps that of the last layers. fusion: buckets by this rule, None for those that the
    configuration asks for. stored: gradients that are reduced alone get storage where that may pay. resent: those of
    what is also looked up are sent before the lookups' part is there, and the rows of that once more. cut_within:
    buckets are those for a step that waits for all of them at its end, whatever the schedule.
    """

    across_steps: bool = False
    postponed: float = 0.0
    fusion: FusionConfig | None = None
    stored: bool = True
    resent: bool = False
    cut_within: bool = False

    def least_stored(self, config: CompileConfig) -> int | None:
        """Bytes from which gradients that are reduced alone get storage, even where that takes more ops: all that can
        be deferred, and those that may be sent in pieces."""
        if self.across_steps:
            return 0
        return StreamBuckets.piece + 1 if config.schedule != "none" else None


def variants(config: CompileConfig, nodes: int, may_resend: bool = False) -> list[Variant]:
    """What to make and compare for a graph of so many nodes, the most promising first: of equally fast ones the first
    is taken. Where buckets are searched for, those that any other mode makes follow.

    may_resend: a gradient has a part of which only some rows are not zero.
    """
    found = [Variant(), Variant(postponed=1.0)]
    if config.across_steps:
        plain, ample, *scant = (Variant(across_steps=True, postponed=part) for part in (0.0, AMPLE, *SCANT))
        within, *others = found
        found = [plain, ample, within, replace(plain, cut_within=True), *scant, *others]
    if may_resend and config.comm_fusion.for_kind("all_reduce").mode == "optimal":
        first, second, *more = [replace(each, resent=True) for each in found[:3]]
        loose = [replace(first, postponed=LOOSE)] if config.across_steps else []
        found = [first, found[0], second, *loose, *more, *found[1:]]
    if not config.comm_fusion.is_optimal:
        found = [each for each in found if not each.postponed and not each.cut_within]
    if config.schedule == "none":
        found = found[:1]
    found = found[: _up_to(SEARCHES, nodes, 1)]
    if not config.plans_by_cost or most_plans(nodes) <= len(found):
        return found
    fixed = [Variant(across_steps=True)] if config.across_steps else []
    fixed += [Variant(), Variant(stored=False)] if config.schedule != "none" else [Variant()]
    if not config.comm_fusion.is_optimal:
        return list(dict.fromkeys([*found, *fixed]))
    return [*found, *(replace(each, fusion=fusion) for fusion in _fixed_fusions(config) for each in fixed)]


def most_plans(nodes: int) -> int:
    """How many plans are made at most for a graph of so many nodes."""
    return _up_to(PLANS, nodes, _up_to(SEARCHES, nodes, 1))


def _up_to(limits: Sequence[tuple[int, int]], nodes: int, above: int) -> int:
    return next((count for most, count in limits if nodes <= most), above)


def _fixed_fusions(config: CompileConfig) -> list[FusionConfig]:
    """Rules that need no search, in place of mode "optimal"."""
    fusion = config.comm_fusion
    fixed = [fusion.in_place_of_optimal(KindFusion("size", mib)) for mib in (ONE_BUCKET_MIB, *FIXED_MIB)]
    return [*fixed, replace(fusion, openstate=False)]


def build_pipeline(
    config: CompileConfig,
    mesh: Mesh,
    sliced_inputs: Sequence[str] = (),
    flat_updates: bool = True,
    variant: Variant | None = None,
    sharding: Sharding | None = None,
    costs: CostModel | None = None,
    same_batches: bool = True,
) -> PassPipeline:
    """The passes of one compile, in order. `sliced_inputs`: tensors that full_batch cuts, or those that have the batch
    as their first dimension where `sharding` says how the step is divided. `variant` and `costs`: by default as the
    configuration says. same_batches: False where ranks' batches differ in size: what makes both gradients of a layer is
    then one op on some ranks and two on others, and the order of two must not matter."""
    variant = Variant(config.across_steps) if variant is None else variant
    if costs is None and config.plans_by_cost:
        costs = cost_model(config.cluster)
    passes: list[Pass] = [Simplify()]
    passes += _divided(config, sliced_inputs, sharding) if sharding else _data_parallel(config, mesh, sliced_inputs)
    passes.append(UpdateParameters())
    if config.schedule != "none" and same_batches:
        passes.append(GradientsFirst())
    if variant.resent:
        passes.append(ResendRows())
    if costs is not None and variant.postponed:
        passes.append(PostponeGradients(costs, last_layers=variant.across_steps, part=variant.postponed))
    passes += [
        FuseCollectives(variant.fusion or config.comm_fusion, costs, variant.across_steps and not variant.cut_within),
        FlattenStorage(flat_updates, costs is not None and variant.stored, variant.least_stored(config)),
        *([TileFirstGradient(costs)] if costs is not None and config.schedule != "none" else []),
        SplitUpdates(variant.across_steps),
        LowerAverage(),
    ]
    if costs is not None and config.schedule != "none":
        passes.append(Schedule(costs, config.memory_limit, variant.across_steps))
        if variant.resent:
            passes.append(VoteFirst(costs))
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
        BroadcastBuffers(group if config.broadcast_buffers else None),
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
    reads: Reads | None = None,
) -> Compiled:
    """Capture and transform one call. With COMMFUSE_VERIFY=1 every pass's result is verified.

    reads: takes notes of the Python values that the trace reads.

    common: what nodes count as, for a plan that all ranks have in common, whatever their batches.
    """
    with one_trace_at_a_time(), no_garbage_collection():
        start = time.perf_counter()
        with torch_is_quiet(not are_full()):
            program = capture(model, loss_fn, structure, leaves, mesh, config, training, optimizer, reads)
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
) -> Planned:
    """Run the passes of every variant, and take the fastest result: the program, its pipeline, what the passes did.

    common: as for `compile_call`. watcher: sees the passes of all variants; by default the graph log.
    """
    check = verify if os.environ.get("COMMFUSE_VERIFY") == "1" else None

    def pipeline(variant: Variant, costs: CostModel | None) -> PassPipeline:
        same = common is None
        return build_pipeline(config, program.mesh, sliced_inputs, flat_updates, variant, sharding, costs, same)

    nodes = len(program.graph.nodes)
    # How many rows are sent again follows from a rank's batch: not where batches differ.
    found = variants(config, nodes, sharding is None and common is None and may_resend(program))
    costs = cost_model(config.cluster) if config.plans_by_cost else None
    if costs is not None and common is not None:
        costs = common_costs(program, pipeline(found[0], costs), costs, common)
    pipelines: list[PassPipeline] = []
    fixed: list[PassPipeline] = []
    for variant in found:
        made = pipeline(variant, costs)
        (fixed if variant.fusion or not variant.stored else pipelines).append(made)
    return fastest(program, pipelines, fixed, costs, most_plans(nodes), check, watcher or graph_log())
