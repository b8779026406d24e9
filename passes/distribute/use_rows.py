"""Let an evaluation gather the rows that ranks keep of parameters, each where it begins to use the parameter."""

from __future__ import annotations

from dataclasses import dataclass

from commfuse_fx.ir.core.builder import Builder
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.rows.shard_uses import keep_rows
from commfuse_fx.passes.declaration import Pass, Situation


@dataclass(frozen=True)
class UseRows(Pass):
    """The training step of the same model has divided the parameters; what `shard_optimizer` does with their uses in
    its forward becomes of those in the evaluation."""

    name = "use_rows"
    numerics = "defines"

    @classmethod
    def when(cls, situation: Situation) -> UseRows | None:
        return cls() if situation.keeps_rows else None

    def __call__(self, program: Program) -> bool:
        if program.training:
            return False
        build = Builder(program)
        names = [name for name, param in program.params.items() if param.shard and param.rows_alone]
        for name in names:
            keep_rows(build, name)
        program.set_output()
        return bool(names)
