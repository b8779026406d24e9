"""Gather or broadcast what ranks have updated of a parameter, so that every rank has all of it.

Why: docs/decisions.md, "Parameters stay whole between steps, up to level 2".
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.meta import NodeInfo
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.rows.shard_rows import updated_nodes
from commfuse_fx.ir.rows.shard_uses import broadcast_whole, gather_rows, without_padding
from commfuse_fx.passes.declaration import Pass, Situation

_LIKE = NodeInfo("update")


@dataclass(frozen=True)
class GatherParameters(Pass):
    """They stand behind all updates, in their order."""

    name = "gather_parameters"
    numerics = "defines"
    requires = ("sharded", "updated")

    @classmethod
    def when(cls, situation: Situation) -> GatherParameters | None:
        return None if situation.config.parallel_optimizer is None or situation.holds_gradients else cls()

    def __call__(self, program: Program) -> bool:
        build = Builder(program)
        names = [name for update in program.updates for segment in update.segments for name, _ in segment.members]
        sharded = [name for name in names if program.params[name].shard]
        rows = updated_nodes(program) if sharded else {}
        with build.before(program.output):
            for name in sharded:
                if program.params[name].owner is None:
                    wait = gather_rows(build, name, rows[name], _LIKE)
                else:
                    wait = broadcast_whole(build, name, _LIKE)
                _write(build, name, wait)
        return bool(sharded)


def _write(build: Builder, name: str, wait: fx.Node) -> None:
    """Copy what was gathered into the parameter, without padding."""
    spec, whole = build.program.params[name].spec, build.program.placeholder("parameter", name)
    gathered = without_padding(build, name, wait, spec, _LIKE)
    build.call(aten.copy_.default, (whole, gathered), spec=spec, like=_LIKE, name=f"shard/{name}/write")
