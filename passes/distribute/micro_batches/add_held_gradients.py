"""Add each gradient to the one that is held already, so that the sum is what is reduced.

That is what `.grad` holds of a module, or what earlier micro-batches of a step have left: sums of this rank alone.
DistributedDataParallel adds and then reduces, too; what was reduced before stays the same, as the mean of equal
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.reshaped import dense_like
from commfuse_fx.ir.ops.partial_gradients import axes_of_held, summands, taken_gradients
from commfuse_fx.ir.ops.redistribution import sum_partial
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
        taken = taken_gradients(program)
        for name in taken:
            held = build.placeholder("gradient", f"{name}.grad", dense_like(program.params[name].spec))
            _add(build, name, held)
        program.set_output()
        return bool(taken)


def _add(build: Builder, name: str, held: fx.Node) -> None:
    """Where both are still to be summed over the same ranks, they are added ahead of that."""
    program = build.program
    value, axes = summands(program, name)
    grad, wanted = program.grads[name], axes_of_held(program, name)
    if axes != wanted:
        value = grad
        if wanted:
            with build.after(grad):
                args = (held, wanted, "sum")
                held = build.call(sum_partial, args, spec=info(held).spec, like=info(grad), name=f"reduce/{name}/held")
    first_sum = None if value is grad else _sum_of(grad, value)
    with build.after(max(value, held)):
        total = build.call(
            aten.add.Tensor,
            (held, value),
            spec=dense_like(program.params[name].spec),
            like=info(grad),
            name=f"reduce/{name}/sum",
        )
    if first_sum is None:
        program.grads[name] = total
    else:  # what else needs this call's gradient, such as that of a norm's input, goes on with it alone
        first_sum.replace_input_with(value, total)


def _sum_of(grad: fx.Node, value: fx.Node) -> fx.Node:
    """The sum over ranks that takes this value on its way to the gradient."""
    while grad.args[0] is not value:
        (grad,) = grad.all_input_nodes
    return grad
