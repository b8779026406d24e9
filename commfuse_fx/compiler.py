"""The order of the passes, and one compile from a call's arguments to a final program."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from commfuse_fx.capture.build import capture
from commfuse_fx.capture.loss import LossFn
from commfuse_fx.capture.tree import Structure
from commfuse_fx.config import CompileConfig
from commfuse_fx.cost.rounds import play
from commfuse_fx.cost.source import cost_model
from commfuse_fx.ir.mesh import Mesh
from commfuse_fx.ir.program import OptimizerInfo, Program
from commfuse_fx.ir.text import canonical_text
from commfuse_fx.ir.verify import verify
from commfuse_fx.lowered import Snapshot
from commfuse_fx.passes.flatten_storage import FlattenStorage
from commfuse_fx.passes.fuse_collectives import FuseCollectives
from commfuse_fx.passes.keep_gradients import KeepGradients
from commfuse_fx.passes.lower_average import LowerAverage
from commfuse_fx.passes.lower_user_collectives import LowerUserCollectives
from commfuse_fx.passes.overlap import Overlap
from commfuse_fx.passes.reduce_gradients import ReduceGradients
from commfuse_fx.passes.reinplace import Reinplace
from commfuse_fx.passes.schedule import Schedule, TooLittleMemory
from commfuse_fx.passes.simplify import Simplify
from commfuse_fx.passes.slice_full_batch import SliceFullBatch
from commfuse_fx.passes.split_updates import SplitUpdates
from commfuse_fx.passes.stream_buckets import StreamBuckets
from commfuse_fx.passes.update_parameters import UpdateParameters
from commfuse_fx.pipeline import Pass, PassPipeline, PassRecord

COMPARED_NODES = 50_000
"""Up to this size a plan across steps is compared with the best plan within the step, buckets and all."""


def build_pipeline(
    config: CompileConfig,
    mesh: Mesh,
    sliced_inputs: Sequence[str] = (),
    flat_updates: bool = True,
    across_steps: bool | None = None,
) -> PassPipeline:
    """The passes of one compile, in order. `sliced_inputs`: tensors that full_batch cuts. `across_steps`: as the
    configuration says, unless given."""
    across_steps = config.across_steps if across_steps is None else across_steps
    group = None if config.parallel_mode == "stand_alone" else mesh.all_axes
    costs = cost_model(config.cluster) if config.plans_by_cost else None
    passes: list[Pass] = [
        Simplify(),
        SliceFullBatch(tuple(sliced_inputs), mesh.all_axes),
        LowerUserCollectives(),
        ReduceGradients(
            group,
            mean=config.gradients_mean,
            fp32=config.gradient_fp32_sync,
            honour_layerwise=config.parallel_mode == "hybrid_parallel",
        ),
        UpdateParameters(),
        FuseCollectives(config.comm_fusion, costs, across_steps),
        FlattenStorage(flat_updates, singles=costs is not None),
        SplitUpdates(across_steps),
        LowerAverage(),
    ]
    if costs is not None and config.schedule != "none":
        passes.append(Schedule(costs, config.memory_limit, across_steps))
    elif config.schedule != "none":
        passes.extend((Overlap(), StreamBuckets()))
    passes.append(KeepGradients())
    passes.append(Reinplace())
    return PassPipeline(tuple(passes))


@dataclass
class Compiled:
    """The final program, the program as captured (to replay the passes from), and what it cost."""

    program: Program
    captured: Program | None
    pipeline: PassPipeline
    records: list[PassRecord]
    capture_seconds: float

    def replay(self) -> Mapping[str, Snapshot]:
        """Run the passes again and keep a text after each."""
        assert self.captured is not None
        program = self.captured.copy()
        stages = {"capture": Snapshot("capture", True, canonical_text(program))}
        texts: dict[str, str] = {}

        def keep(name: str, program: Program) -> None:
            texts[name] = canonical_text(program)

        for record in self.pipeline.run(program, observers=(keep,)):
            stages[record.name] = Snapshot(record.name, record.modified, texts[record.name])
        return stages


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
) -> Compiled:
    """Capture and transform one call. With COMMFUSE_VERIFY=1 every pass's result is verified."""
    with _no_garbage_collection():
        start = time.perf_counter()
        program = capture(model, loss_fn, structure, leaves, mesh, config, training, optimizer)
        seconds = time.perf_counter() - start
        captured = program.copy() if keep_captured else None
        check = verify if os.environ.get("COMMFUSE_VERIFY") == "1" else None
        pipelines = [build_pipeline(config, mesh, sliced_inputs, flat_updates)]
        if config.across_steps and len(program.graph.nodes) <= COMPARED_NODES:
            pipelines.append(build_pipeline(config, mesh, sliced_inputs, flat_updates, across_steps=False))
        copies = [program, *(program.copy() for _ in pipelines[1:])]
        planned: list[Compiled] = []
        failed: list[TooLittleMemory] = []
        for each, pipeline in zip(copies, pipelines, strict=True):
            try:
                planned.append(Compiled(each, captured, pipeline, pipeline.run(each, check), seconds))
            except TooLittleMemory as error:
                failed.append(error)
        if not planned:
            raise min(failed, key=lambda error: error.needed)
        return min(planned, key=_predicted_seconds) if len(planned) > 1 else planned[0]


def _predicted_seconds(compiled: Compiled) -> float:
    """Rounded to nanoseconds: of equally fast plans the first is taken."""
    played = play(compiled.program, cost_model(compiled.program.config.cluster))
    return round(played.ended - played.began, 9)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A compile makes many objects and little garbage; scanning them again and again took half of the passes' time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
