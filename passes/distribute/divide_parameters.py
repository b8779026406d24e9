"""Divide gradients of a module among the ranks, and parameters: each rank keeps rows, and gathers what it uses.

Why: docs/decisions.md, "A divided module hands out whole tensors without memory".
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from commfuse_fx.errors import NotAvailableError
from commfuse_fx.ir.core.builder import Builder
from commfuse_fx.ir.core.meta import tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.rows.shard_gradients import ON_CPU, reduction, scatter, serves_only
from commfuse_fx.ir.rows.shard_uses import keep_rows, written_by_model
from commfuse_fx.ir.updates.update_sharing import SHARED, WHOLE, divided_by_rule, in_rows, who_updates
from commfuse_fx.passes.declaration import Pass, Situation


@dataclass(frozen=True)
class DivideParameters(Pass):
    """Levels 2 and 3 of a module, whose caller updates: ranks get rows of reduced gradients.

    Gradients of one rank alone stay whole, and so do those that a parameter which is not divided has as well.

    keep_rows: whether ranks keep rows of parameters alone, too.
    """

    name = "divide_parameters"
    numerics = "defines"
    requires = ("reduced",)
    ensures = ("sharded",)

    keep_rows: bool = True

    @classmethod
    def when(cls, situation: Situation) -> DivideParameters | None:
        divides = situation.scatters_gradients and situation.gradients != "given"
        return cls(situation.keeps_rows) if divides else None

    def __call__(self, program: Program) -> bool:
        if not program.has_two_halves or program.mesh.world == 1:
            return False
        build, mesh = Builder(program), program.mesh
        reasons = divided_by_rule(program.params, mesh, program.config)
        names = [name for name, reason in reasons.items() if not reason]
        for name, reason in reasons.items():
            if reason:
                program.note(WHOLE, name, reason)
        if self.keep_rows:
            _refuse_written(program, names)
        for name in names:
            param = program.params[name] = in_rows(program.params[name], mesh, program.config)
            program.note(SHARED, name, who_updates(param, mesh))
        scattered = _scattered(program, names)
        for start, members in scattered.items():
            scatter(build, start, members, program.params[members[0]].shard)
        if any(program.params[name].spec.device == "cpu" for members in scattered.values() for name in members):
            program.note("on CPU", "reduce_scatter", ON_CPU)
        for name in names if self.keep_rows else ():
            keep_rows(build, name)
        program.set_output()
        return bool(names)


def _refuse_written(program: Program, names: list[str]) -> None:
    """Whether a parameter is divided may not depend on what one graph does with it."""
    written = written_by_model(program)
    if name := next((name for name in names if name in written), None):
        raise NotAvailableError(
            f'parameter {name} is written by the model itself, and parallel_optimizer_config={{"level": 3}} keeps rows '
            "of it alone: leave it whole with param.parallel_optimizer = False"
        )


def _scattered(program: Program, names: list[str]) -> dict[fx.Node, list[str]]:
    """The starts that reduce gradients of divided parameters and nothing else, each with the names of these."""
    found: dict[fx.Node, list[str]] = {}
    for name, grad in program.grads.items():
        if (start := reduction(grad)) is not None:
            found.setdefault(start, []).append(name)
    divided = dict.fromkeys(names)
    return {start: members for start, members in found.items() if _may_scatter(program, start, members, divided)}


def _may_scatter(program: Program, start: fx.Node, members: list[str], divided: dict[str, None]) -> bool:
    shapes = [program.params[name].spec.shape for name in members]
    same = all(shape == tensor_spec(start).shape for shape in shapes)
    return same and all(name in divided for name in members) and serves_only(start, program)
