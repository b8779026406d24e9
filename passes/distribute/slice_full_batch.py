"""Let every rank take its slice of the global batch (full_batch=True), by its coordinate on the mesh."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch

from commfuse_fx.ir.core.builder import Builder
from commfuse_fx.ir.core.functions import axis_index
from commfuse_fx.ir.core.meta import NodeInfo, TensorSpec, set_info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import Pass, Situation

aten = torch.ops.aten


@dataclass(frozen=True)
class SliceFullBatch(Pass):
    """The tensors in `program.batch_inputs` are cut along dimension 0, by the ranks of `group`."""

    name = "slice_full_batch"
    numerics = "defines"

    group: str

    @classmethod
    def when(cls, situation: Situation) -> SliceFullBatch | None:
        return None if situation.divides else cls(situation.mesh.all_axes)

    def __call__(self, program: Program) -> bool:
        size = program.mesh.size(self.group)
        build = Builder(program)
        placeholders = [program.placeholder("input", path) for path in program.batch_inputs]
        if size == 1 or not placeholders:
            return False
        like = NodeInfo("forward")
        cursor = program.last_input
        with build.after(cursor):
            index = build.call(axis_index, (self.group,), spec=None, like=like, name=f"axis_index/{self.group}")
        cursor = index
        for node in placeholders:
            assert node is not None
            local = tensor_spec(node)
            rows = local.shape[0]
            full = TensorSpec((rows * size, *local.shape[1:]), local.dtype, local.stride, local.device)
            path = program.sources[node].name
            with build.after(cursor):
                start = build.call(operator.mul, (index, rows), spec=None, like=like, name=f"slice/start.{path}")
            with build.after(start):
                args = (node, 0, start, rows)
                local_slice = build.call(aten.narrow.default, args, spec=local, like=like, name=f"slice/{path}")
            for user in [user for user in node.users if user is not local_slice]:
                user.replace_input_with(node, local_slice)
            set_info(node, NodeInfo("input", full, name=path))
            cursor = local_slice
        return True
