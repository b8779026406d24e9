"""Add each gradient to the sum of earlier micro-batches, and leave it there for the one that updates.

Why: docs/decisions.md, "Sums of micro-batches are written at the end of a call, and lie beside the parameters".
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.edit import remove_dead_nodes
from commfuse_fx.ir.core.meta import NodeInfo, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.reshaped import dense_like
from commfuse_fx.ir.ops.partial_gradients import axes_of_held, summands, taken_gradients
from commfuse_fx.passes.declaration import Pass, Situation

_LIKE = NodeInfo("update")


@dataclass(frozen=True)
class HoldGradients(Pass):
    """The graph of a micro-batch that others follow: no gradient is reduced, and no parameter is updated.

    Sums are written at the end, so that a micro-batch that fails has left nothing.

    goes_on: whether gradients stay in the graph until other passes have divided it as they divide that of the last one.
    """

    name = "hold_gradients"
    numerics = "defines"
    requires = ("simplified",)
    ensures = ("updated",)  # nothing is

    goes_on: bool = False

    @classmethod
    def when(cls, situation: Situation) -> HoldGradients | None:
        return cls(situation.shards_micro_batches) if situation.holds_gradients else None

    def __call__(self, program: Program) -> bool:
        if not program.grads:
            return False
        build = Builder(program)
        values = {name: _value(build, name) for name in taken_gradients(program)}
        for name, value in values.items():
            spec = dense_like(program.params[name].spec)
            held = build.placeholder("gradient", f"{name}.grad", spec)
            with build.before(program.output):
                build.call(aten.add_.Tensor, (held, value), spec=spec, like=_LIKE, name=f"reduce/{name}/hold")
        if not self.goes_on:
            program.grads = {}
            program.set_output()
            remove_dead_nodes(program)
        return True


def _value(build: Builder, name: str) -> fx.Node:
    """What this rank adds of a gradient to the sums that are reduced later."""
    program = build.program
    value, axes = summands(program, name)
    wanted = axes_of_held(program, name)
    if axes == wanted:
        return value
    value = program.grads[name]
    if not wanted:
        return value
    # All ranks along these axes have the same: each adds its share.
    args = (value, program.mesh.size(wanted))
    with build.before(program.output):
        spec = dense_like(tensor_spec(value))
        return build.call(aten.div.Scalar, args, spec=spec, like=_LIKE, name=f"reduce/{name}/share")
