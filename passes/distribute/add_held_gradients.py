"""Add each gradient to the one that the parameter holds already, so that the sum is what is reduced.

After micro-batches whose gradients were not reduced, `.grad` holds sums of this rank alone. DistributedDataParallel
adds and then reduces, too; what was reduced before stays the same, as the mean of equal numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from commfuse_fx.ir.builder import Builder, aten
from commfuse_fx.ir.meta import info
from commfuse_fx.ir.program import Program
from commfuse_fx.ir.reshaped import dense_like
from commfuse_fx.passes.declaration import Pass, Situation


@dataclass(frozen=True)
class AddHeldGradients(Pass):
    """Every gradient becomes the sum of what the graph computes and of an input, in this order."""

    name = "add_held_gradients"
    numerics = "defines"
    requires = ("simplified",)

    @classmethod
    def when(cls, situation: Situation) -> AddHeldGradients | None:
        return cls() if situation.gradients == "accumulated" else None

    def __call__(self, program: Program) -> bool:
        build = Builder(program)
        for name, grad in program.grads.items():
            spec = dense_like(program.params[name].spec)
            held = build.placeholder("gradient", f"{name}.grad", spec)
            with build.after(grad):
                program.grads[name] = build.call(
                    aten.add.Tensor,
                    (held, grad),
                    spec=spec,
                    like=info(grad),
                    name=f"reduce/{name}/sum",
                )
        program.set_output()
        return bool(program.grads)
