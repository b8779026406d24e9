"""Draw the masks of dropout from 16 random bits per number on CPUs, where torch's kernel takes 64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from commfuse_fx.ir.core.meta import tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.kernels.masks import bernoulli
from commfuse_fx.passes.declaration import Pass, Situation

aten = torch.ops.aten


@dataclass(frozen=True)
class DrawMasks(Pass):
    """Probabilities stay the same, and masks those of the rank's own stream; other numbers come from it.

    `at_least`: smaller masks, in numbers, stay with torch's kernel, which is one call.
    """

    name = "draw_masks"
    numerics = "defines"
    needs_sizes = True

    at_least: int = 16384

    @classmethod
    def when(cls, situation: Situation) -> DrawMasks | None:
        # A rank that is alone draws what eager execution draws.
        is_alone = situation.config.parallel_mode == "stand_alone" or situation.mesh.world == 1
        return cls() if situation.rewrites_kernels and not is_alone else None

    def __call__(self, program: Program) -> bool:
        found = [node for node in program.graph.nodes if self._is_mask(node)]
        for node in found:
            node.target = bernoulli
        return bool(found)

    def _is_mask(self, node: fx.Node) -> bool:
        if node.target is not aten.bernoulli.p or len(node.args) != 2 or node.kwargs:
            return False
        spec = tensor_spec(node)
        return spec.device == "cpu" and spec.numel >= self.at_least
