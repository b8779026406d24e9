"""Let the graph of a micro-batch end with what it holds: nothing else is done with its gradients."""

from __future__ import annotations

from dataclasses import dataclass

from commfuse_fx.ir.core.edit import remove_dead_nodes
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import Pass, Situation


@dataclass(frozen=True)
class DropGradients(Pass):
    """Reductions whose results nobody has added to what is held are left to the micro-batch that updates."""

    name = "drop_gradients"
    numerics = "defines"
    requires = ("sharded",)

    @classmethod
    def when(cls, situation: Situation) -> DropGradients | None:
        return cls() if situation.shards_micro_batches else None

    def __call__(self, program: Program) -> bool:
        dropped, program.grads = program.grads, {}
        program.set_output()
        remove_dead_nodes(program)
        return bool(dropped)
