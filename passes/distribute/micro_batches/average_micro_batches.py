"""Let the gradients of several micro-batches add up to their mean: each backward begins with its part of 1.

Why: docs/decisions.md, "Sums of micro-batches are written at the end of a call, and lie beside the parameters".
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from commfuse_fx.errors import CaptureError
from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.edit import ALIASES
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import Pass, Situation


@dataclass(frozen=True)
class AverageMicroBatches(Pass):
    """As a loop does that calls `(loss / count).backward()`. The loss that is returned is still the whole one."""

    name = "average_micro_batches"
    numerics = "defines"
    requires = ("simplified",)

    count: int

    @classmethod
    def when(cls, situation: Situation) -> AverageMicroBatches | None:
        config = situation.config
        return cls(config.accumulate_steps) if config.accumulate_steps > 1 and config.gradients_mean else None

    def __call__(self, program: Program) -> bool:
        if not program.grads:
            return False
        build, seed = Builder(program), _seed(program)
        with build.after(seed):
            details = info(seed)
            share = build.call(
                aten.div.Scalar, (seed, self.count), spec=details.spec, like=details, name="reduce/share_of_micro_batch"
            )
        seed.replace_all_uses_with(share)
        share.args = (seed, self.count)
        return True


def _seed(program: Program) -> fx.Node:
    """The gradient of the loss by itself, with which autograd begins."""
    loss = _unaliased(program.loss)
    ones = (node for node in program.graph.nodes if node.target is aten.ones_like.default)
    seed: fx.Node | None = next((node for node in ones if _unaliased(node.all_input_nodes[0]) is loss), None)
    if seed is None:
        raise CaptureError(
            "accumulate_steps: the backward does not begin with the gradient of the loss, so the mean over "
            "micro-batches cannot be taken; pass gradients_mean=False, and divide by accumulate_steps in loss_fn"
        )
    return seed


def _unaliased(node: fx.Node) -> fx.Node:
    while node.target in ALIASES:
        node = node.all_input_nodes[0]
    return node
