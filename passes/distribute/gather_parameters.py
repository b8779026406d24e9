"""Gather what each rank has updated of a parameter, so that every rank has all of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from commfuse_fx.ir.builder import Builder, aten
from commfuse_fx.ir.collectives import c10d
from commfuse_fx.ir.meta import CollectiveInfo, NodeInfo, tensor_spec
from commfuse_fx.ir.program import Program
from commfuse_fx.ir.shard_rows import padding_of, updated
from commfuse_fx.passes.declaration import Pass, Situation

_LIKE = NodeInfo("update")


@dataclass(frozen=True)
class GatherParameters(Pass):
    """The gathers stand behind all updates, in their order."""

    name = "gather_parameters"
    numerics = "defines"
    requires = ("sharded", "updated")

    @classmethod
    def when(cls, situation: Situation) -> GatherParameters | None:
        return None if situation.config.parallel_optimizer is None else cls()

    def __call__(self, program: Program) -> bool:
        build = Builder(program)
        names = [name for update in program.updates for segment in update.segments for name, _ in segment.members]
        sharded = [name for name in names if program.params[name].shard]
        with build.before(program.output):
            waits = {name: _gather(build, name) for name in sharded}
            for name, wait in waits.items():
                _write(build, name, wait)
        return bool(sharded)


def _gather(build: Builder, name: str) -> fx.Node:
    program = build.program
    param, mesh = program.params[name], program.mesh
    rows, ways = updated(program, name), mesh.size(param.shard)
    part = tensor_spec(rows)
    gathered = part.with_shape((part.shape[0] * ways, *part.shape[1:]))
    collective = CollectiveInfo(
        "all_gather",
        group=param.shard,
        dtype=part.dtype,
        nbytes=param.spec.nbytes,
        members=(name,),
        sequence=param.sequence,
        fusion_id=param.fusion_id,
        role="parameter",
    )
    start = build.call(
        c10d.all_gather_into_tensor.default,
        (rows, ways, param.shard),
        spec=gathered,
        like=_LIKE,
        name=f"shard/{name}/all_gather",
        collective=collective,
    )
    return build.wait(start, f"shard/{name}/wait")


def _write(build: Builder, name: str, wait: fx.Node) -> None:
    """Copy what was gathered into the parameter, without padding."""
    program = build.program
    param = program.params[name]
    if padding_of(param, program.mesh):
        args = (wait, 0, 0, param.spec.shape[0])
        wait = build.call(aten.narrow.default, args, spec=param.spec, like=_LIKE, name=f"shard/{name}/without_padding")
    whole = program.placeholder("parameter", name)
    build.call(aten.copy_.default, (whole, wait), spec=param.spec, like=_LIKE, name=f"shard/{name}/write")
