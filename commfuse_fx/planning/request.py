"""What a compile is asked for: the model and the call, and what the passes are to do with the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import fx, nn

from commfuse_fx.capture.guards.tree import Structure
from commfuse_fx.capture.loss import LossFn
from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.ir.core.mesh import Mesh
from commfuse_fx.ir.core.program import Layouts, OptimizerInfo, Program
from commfuse_fx.planning.variants.attempts import OnPlan
from commfuse_fx.planning.variants.shared_prices import Seconds
from commfuse_fx.sharding.dividing.resolve import resolve_marks
from commfuse_fx.sharding.dividing.strategies import Strategies
from commfuse_fx.sharding.marking.marks import Marks


@dataclass(frozen=True)
class Sharding:
    """What dividing a step takes besides its graph.

    batch_ways: by how many ranks the batch of the captured graph is larger than the one that a rank is handed.
    batch_parts: among how many ranks the batch of the captured graph is divided.
    local_parameters: every rank keeps its part of a parameter; fixed: the layouts that an earlier graph of the same
    step has decided, or None; strategies: those that a file has, or None.
    """

    marks: Marks
    batch_ways: int = 1
    batch_parts: int = 1
    local_parameters: bool = False
    fixed: Layouts | None = None
    strategies: Strategies | None = None


@dataclass(frozen=True)
class Call:
    """The arguments of one call, taken apart into tensors with their paths and the structure around them."""

    structure: Structure
    leaves: Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class PassRequest:
    """What the passes are asked for besides what the configuration says.

    sliced_inputs: paths of the tensors that full_batch cuts; with `sharding`, of those whose dimension 0 is the batch.
    flat_updates: False where the optimizer's state does not let an update work on flat memory.
    sharding: how the step is divided, None for data parallelism.
    common: what nodes count as in a plan that all ranks have in common, whatever their batches.
    gradients: what becomes of them, as in `Situation`.
    by_rules: whether nothing follows from prices, as in `Situation`.
    """

    sliced_inputs: Sequence[str] = ()
    flat_updates: bool = True
    sharding: Sharding | None = None
    common: Seconds | None = None
    gradients: str = "reduced"
    by_rules: bool = False


@dataclass(frozen=True)
class CompileRequest:
    """One compile.

    model, loss_fn, call: what is traced.
    training: whether gradients are taken and the parameters updated.
    optimizer: describes the update; None where the caller is handed the gradients.
    keep_captured: whether the graph as captured is kept, to replay the passes from.
    form: "step"; "module" where the caller gets the outputs and starts the backward; or "update" where the caller has
        the gradients, and these are the call's argument: a dict by the names of the parameters.
    on_plan: told of each plan that is made.
    """

    model: nn.Module
    loss_fn: LossFn | None
    call: Call
    mesh: Mesh
    config: CompileConfig
    training: bool
    optimizer: OptimizerInfo | None
    passes: PassRequest
    keep_captured: bool = False
    form: str = "step"
    on_plan: OnPlan | None = None


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
