"""Prices that are the same on ranks whose batches differ in size, so that they come to the same plan.

Why: docs/decisions.md, "Plans by cost follow rank 0's prices where batches differ".
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

from torch import fx

from commfuse_fx.cost.model import CostModel, profile_key
from commfuse_fx.ir.core.collectives import is_start, is_wait
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import Pass
from commfuse_fx.planning.pipeline.pass_table import KERNELS, UPDATE
from commfuse_fx.planning.pipeline.pipeline import PassPipeline
from commfuse_fx.planning.pipeline.registry import find_pass

Seconds = Mapping[str, float]
"""Of compute nodes, by name."""


def seconds_by_name(captured: Program, pipeline: PassPipeline, costs: CostModel) -> Seconds:
    """What each compute node takes here, before passes arrange it by the size of the batch."""
    front = [each for each in _front(pipeline) if find_pass(each.name).stage != KERNELS]
    return {name: costs.compute_seconds(node) for name, node in _nodes_behind(front, captured).items()}


def common_costs(captured: Program, pipeline: PassPipeline, costs: CostModel, seconds: Seconds) -> CostModel:
    """The same prices for each rank: `seconds`, which one rank has found and given to all. A node that it does not know
    is there because of this rank's batch, and costs nothing. Later passes make nodes as large as parameters, alike on
    all ranks."""
    named = {name: seconds.get(name, 0.0) for name in _nodes_behind(_front(pipeline), captured)}
    return CostModel(costs.cluster, {**(costs.node_seconds or {}), **named})


def _front(pipeline: PassPipeline) -> list[Pass]:
    return list(takewhile(lambda each: find_pass(each.name).stage != UPDATE, pipeline.passes))


def _nodes_behind(passes: list[Pass], captured: Program) -> dict[str, fx.Node]:
    program = captured.copy()
    PassPipeline(tuple(passes)).run(program)
    nodes = (node for node in program.graph.nodes if node.op == "call_function")
    return {profile_key(node): node for node in nodes if not is_start(node) and not is_wait(node)}
