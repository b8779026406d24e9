"""Gradients as they are ahead of the sums over ranks with which a divided graph ends.

Why: docs/decisions.md, "Sums of micro-batches are written at the end of a call, and lie beside the parameters".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from torch import fx

from commfuse_fx.ir.core.placement import Shard
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.redistribution import sum_partial


def taken_gradients(program: Program) -> dict[str, fx.Node]:
    """The gradients that the optimizer takes, by parameter; all of them where there is none."""
    if program.optimizer is None:
        return dict(program.grads)
    held = dict.fromkeys(name for group in program.optimizer.groups for name in group.params)
    return {name: grad for name, grad in program.grads.items() if name in held}


def summands(program: Program, name: str) -> tuple[fx.Node, str]:
    """What each rank has of a gradient before it is summed at the end, and the mesh axes over which that happens.

    A gradient that several parameters share, or that others need, counts as it is.
    """
    grad: fx.Node = program.grads[name]
    axes: dict[str, None] = {}
    if Counter(program.grads.values())[grad] > 1:
        return grad, ""
    while grad.target is sum_partial and grad.args[2] == "sum" and len(grad.users) == 1:
        axes.update(dict.fromkeys(str(grad.args[1]).split(",")))
        summand = grad.args[0]
        assert isinstance(summand, fx.Node)
        grad = summand
    return grad, _joined(program, axes)


def axes_of_held(program: Program, name: str) -> str:
    """The mesh axes over which what is held of a gradient is still to be summed, the same in all graphs of a step:
    those over which the batch is divided, but for those that divide the parameter."""
    layout = program.params[name].layout
    dividing = {axis for group, placement in layout if isinstance(placement, Shard) for axis in group.split(",")}
    return _joined(program, [axis for axis in program.batch_axes.split(",") if axis not in dividing])


def _joined(program: Program, axes: Collection[str]) -> str:
    """The axes that have several ranks, in the order of the mesh."""
    return ",".join(axis for axis in program.mesh.names if axis in axes and program.mesh.size(axis) > 1)
