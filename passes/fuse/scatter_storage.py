"""Let the gradients whose rows a fused reduce_scatter hands out be written into its memory as they are computed.

A concatenation would wait for the last of them. So what is complete can be sent while the others are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from commfuse_fx.ir.core.builder import Builder
from commfuse_fx.ir.core.collectives import kind_of, tables_of
from commfuse_fx.ir.core.edit import erase_upwards
from commfuse_fx.ir.core.meta import Stretch, TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.gradient_places import ALIGNMENT, allocate, source_of, write
from commfuse_fx.passes.declaration import Pass, Situation


@dataclass(frozen=True)
class ScatterStorage(Pass):
    """Its memory is not kept between steps: updates are divided where memory is short.

    Bitwise neutral.
    """

    name = "scatter_storage"
    numerics = "bitwise"
    requires = ("fused",)

    @classmethod
    def when(cls, situation: Situation) -> ScatterStorage | None:
        return cls() if situation.schedules and situation.config.parallel_optimizer is not None else None

    def __call__(self, program: Program) -> bool:
        buckets = [start for start in program.collectives() if _holds_gradients(start, program)]
        position = {node: i for i, node in enumerate(program.graph.nodes)}
        for start in buckets:
            _write_apart(Builder(program), start, position)
        return bool(buckets)


def _holds_gradients(start: fx.Node, program: Program) -> bool:
    """Whether all members are gradients of parameters, each of which fills whole cache lines."""
    details = info(start)
    if kind_of(start) != "reduce_scatter" or not details.parts or details.collective is None:
        return False
    if details.collective.role != "gradient":
        return False
    names = (name for part in details.parts for name in part.names)
    sizes = (tensor_spec(part.value).nbytes for part in details.parts)
    return all(name in program.params for name in names) and not any(size % ALIGNMENT for size in sizes)


def _write_apart(build: Builder, start: fx.Node, position: dict[fx.Node, int]) -> None:
    """Write the members into memory of the bucket, each behind what computes it, in place of their concatenation."""
    tables, label = tables_of(start), info(start).name.rsplit("/", 1)[0]
    assert tables is not None
    old = start.args[0]
    assert isinstance(old, fx.Node)
    like = tensor_spec(old)
    specs = [like.with_shape(tensor_spec(part.value).shape) for part in info(start).parts]
    sources = [source_of(part.value, spec) for part, spec in zip(info(start).parts, specs, strict=True)]
    first = min(sources, key=position.__getitem__)
    storage = allocate(build, TensorSpec.flat(like.numel, like), first, info(start), f"{label}/storage", kept=False)
    writes: list[tuple[fx.Node, Stretch]] = []
    begin = 0
    for part, spec, source, size in zip(info(start).parts, specs, sources, tables.sizes, strict=True):
        name = _names(label, part.names[0])
        made = write(build, source, storage, spec, begin * tables.ways, name)
        writes.append((made, Stretch(begin, begin + size)))
        begin += size
    start.replace_input_with(old, storage)
    info(start).writes = tuple(writes)
    erase_upwards(build.program, old)


def _names(label: str, member: str) -> Callable[[str], str]:
    return lambda what: f"{label}/{what}.{member}"
