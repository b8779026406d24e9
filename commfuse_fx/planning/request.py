"""What a compile is asked for besides the call: how a step is divided."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import fx

from commfuse_fx.config.compile_config import CompileConfig
from commfuse_fx.ir.mesh import Mesh
from commfuse_fx.ir.program import Program
from commfuse_fx.passes.distribute.divide import Layouts
from commfuse_fx.sharding.dividing.resolve import resolve_marks
from commfuse_fx.sharding.marking.marks import Marks


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
