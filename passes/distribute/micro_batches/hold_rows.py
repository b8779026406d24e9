"""Let micro-batches leave sums of the rows that a rank updates, in place of sums of whole gradients.

Why: docs/decisions.md, "Sums of rows are added behind the reduction, and casts stand in front of the gather".
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.collectives import is_wait, kind_of
from commfuse_fx.ir.core.meta import NodeInfo, info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.reshaped import dense_like
from commfuse_fx.passes.declaration import Pass, Situation


@dataclass(frozen=True)
class HoldRows(Pass):
    """Gradients are added to what is held behind the reduction that gives a rank its rows, no longer ahead of it.

    So each micro-batch reduces them, and sums take as much memory as the rows. They have the dtype of what was sent.
    Gradients whose update is not divided are still added up whole, and reduced by the last micro-batch alone.

    updates: whether the graph is that of the last micro-batch, which goes on with the sum.
    """

    name = "hold_rows"
    numerics = "defines"
    requires = ("sharded",)

    updates: bool = True

    @classmethod
    def when(cls, situation: Situation) -> HoldRows | None:
        return cls(not situation.holds_gradients) if situation.holds_rows else None

    def __call__(self, program: Program) -> bool:
        build = Builder(program)
        names = [name for name in program.grads if _is_divided(program, name)]
        for name in names:
            _hold(build, name, self.updates)
        program.set_output()
        return bool(names)


def _is_divided(program: Program, name: str) -> bool:
    """Whether rows of a gradient, or all of it on one rank, are added to what is held."""
    param = program.params[name]
    return bool(param.shard or param.rows_alone) and program.placeholder("gradient", f"{name}.grad") is not None


def _hold(build: Builder, name: str, updates: bool) -> None:
    program = build.program
    held = program.placeholder("gradient", f"{name}.grad")
    assert held is not None
    (of_whole,) = held.users
    added = info(of_whole).name
    _erase(program, of_whole)
    rows = _rows(program, name)
    spec = info(held).spec = dense_like(tensor_spec(rows))
    if not updates:
        with build.before(program.output):
            build.call(aten.add_.Tensor, (held, rows), spec=spec, like=NodeInfo("update"), name=added)
        return
    users = list(rows.users)
    with build.after(rows):
        total = build.call(aten.add.Tensor, (held, rows), spec=spec, like=info(rows), name=added)
    for user in users:
        user.replace_input_with(rows, total)
    if program.grads[name] is rows:
        program.grads[name] = total


def _erase(program: Program, of_whole: fx.Node) -> None:
    """Take out what adds to a whole gradient. Users of the sum get what this micro-batch has."""
    _, value = of_whole.all_input_nodes
    of_whole.replace_all_uses_with(value)
    program.graph.erase_node(of_whole)
    program.names.release(info(of_whole).name)


def _rows(program: Program, name: str) -> fx.Node:
    """What this rank gets of a reduced gradient: its rows, still to be summed where other ranks have the same ones; or
    what the owner has."""
    grad: fx.Node = program.grads[name]
    if program.params[name].owner is not None:
        return grad
    while not (is_wait(grad) and kind_of(grad.all_input_nodes[0]) == "reduce_scatter"):
        grad = grad.all_input_nodes[0]
    return grad
