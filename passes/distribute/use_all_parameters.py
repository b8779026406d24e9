"""Let parameters that a backward does not reach take part, as DDP does with find_unused_parameters=True.

Ranks may reach other parameters, and still have to send the same. One number per parameter tells which ranks have
reached it: where that is none, its `.grad` stays what it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.collectives import c10d
from commfuse_fx.ir.core.halves import USED
from commfuse_fx.ir.core.meta import CollectiveInfo, NodeInfo, TensorSpec, set_info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.reshaped import dense_like
from commfuse_fx.ir.ops.gradients import end_of_backward
from commfuse_fx.passes.declaration import Pass, Situation


@dataclass(frozen=True)
class UseAllParameters(Pass):
    """Every trainable parameter has a gradient; the ranks of `group` count who has reached it.

    accumulates: whether `.grad` holds sums of earlier backwards that were not reduced, which count as well.
    """

    name = "use_all_parameters"
    numerics = "defines"
    requires = ("simplified",)

    group: str
    accumulates: bool = False

    @classmethod
    def when(cls, situation: Situation) -> UseAllParameters | None:
        if not situation.config.find_unused_parameters or situation.reduced_group is None:
            return None
        return cls(situation.reduced_group, situation.gradients == "accumulated")

    def __call__(self, program: Program) -> bool:
        if not program.has_two_halves or not program.training or program.mesh.size(self.group) == 1:
            return False
        build = Builder(program)
        names = [name for name, param in program.params.items() if param.trainable]
        self._count(build, [name in program.grads for name in names])
        grads = dict(program.grads)
        for name in names:
            if name not in grads:
                spec = dense_like(program.params[name].spec)
                with build.before(end_of_backward(program)):
                    grads[name] = build.zeros(spec, NodeInfo("backward"), f"reduce/{name}/unused")
        program.grads = {name: grads[name] for name in program.params if name in grads}
        program.set_output()
        return True

    def _count(self, build: Builder, used: list[bool]) -> None:
        """A sum over the ranks, which begins when the first gradient is there."""
        program = build.program
        device = next(iter(program.params.values())).spec.device
        program.constants[_NAME] = torch.tensor(used, dtype=torch.int32, device=device)
        spec = TensorSpec.of(program.constants[_NAME])
        place = {node: i for i, node in enumerate(program.graph.nodes)}
        like = NodeInfo("backward")
        with build.before(min(program.grads.values(), key=place.__getitem__, default=program.loss).next):
            mine = program.graph.create_node("get_attr", _NAME)
            set_info(mine, NodeInfo("input", spec, name=program.names.numbered("constant")))
            if self.accumulates:
                before = build.placeholder("gradient", USED, spec)
                mine = build.call(aten.add.Tensor, (mine, before), spec=spec, like=like, name=f"{USED}/sum")
            details = CollectiveInfo(
                "all_reduce", self.group, torch.int32, spec.nbytes, (USED,), -1, reduce_op="sum", role="used"
            )
            start = build.call(
                c10d.all_reduce.default,
                (mine, "sum", self.group),
                spec=spec,
                like=like,
                name=f"{USED}/all_reduce",
                collective=details,
            )
        with build.before(end_of_backward(program)):
            program.aux[USED] = build.wait(start, f"{USED}/wait")


_NAME = "_used_parameters"
