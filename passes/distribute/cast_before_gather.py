"""Cast the rows of a parameter before they are gathered, where all that is used of it is a cast.

Why: docs/decisions.md, "Sums of rows are added behind the reduction, and casts stand in front of the gather".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.collectives import collective_of, kind_of, wait_of
from commfuse_fx.ir.core.dependence import is_view
from commfuse_fx.ir.core.edit import replace_all
from commfuse_fx.ir.core.meta import dtype_name, info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import Pass, Situation


@dataclass(frozen=True)
class CastBeforeGather(Pass):
    """Under autocast the forward uses float32 parameters in bf16: the gather then sends half of the bytes.

    A gather moves elements and computes nothing, so the gathered casts are the cast of what was gathered, bit for bit.
    """

    name = "cast_before_gather"
    numerics = "bitwise"
    requires = ("sharded",)

    @classmethod
    def when(cls, situation: Situation) -> CastBeforeGather | None:
        return cls() if situation.keeps_rows else None

    def __call__(self, program: Program) -> bool:
        build = Builder(program)
        starts = [start for start in program.collectives() if kind_of(start) == "all_gather"]
        changed = [_cast_first(build, start) for start in starts]
        return any(changed)


def _cast_first(build: Builder, start: fx.Node) -> bool:
    """Let a gather send casts, if nothing else is used of it. Returns whether it does now."""
    chain = [wait_of(start)]
    while len(chain[-1].users) == 1 and is_view(user := next(iter(chain[-1].users))):
        chain.append(user)
    casts = list(chain[-1].users)
    sent = tensor_spec(start).dtype
    if not casts or not all(_is_plain_cast(node) for node in casts):
        return False
    dtype = tensor_spec(casts[0]).dtype
    if dtype.itemsize >= sent.itemsize or any(tensor_spec(node).dtype != dtype for node in casts):
        return False
    rows, details = start.args[0], info(start)
    assert isinstance(rows, fx.Node)
    with build.before(start):
        name = f"{details.name.rpartition('/')[0]}/{dtype_name(dtype)}"
        cast = build.cast(rows, dtype, name)
    info(cast).phase = details.phase
    start.args = (cast, *start.args[1:])
    collective = collective_of(start)
    details.collective = replace(collective, dtype=dtype, nbytes=collective.nbytes // sent.itemsize * dtype.itemsize)
    for node in (start, *chain):
        info(node).spec = tensor_spec(node).with_dtype(dtype)
    replace_all(build.program, dict.fromkeys(casts, chain[-1]))
    for node in casts:
        build.graph.erase_node(node)
        build.program.names.release(info(node).name)
    return True


def _is_plain_cast(node: fx.Node) -> bool:
    """Whether a node gives the same elements, as they lie, in another dtype of floating point."""
    if node.target is not aten._to_copy.default:
        return False
    value, made = tensor_spec(node.all_input_nodes[0]), tensor_spec(node)
    return made.dtype in _NARROW and value.with_dtype(made.dtype) == made


_NARROW = (torch.bfloat16, torch.float16, torch.float32)
