"""Keep the memory of gradients between steps, as far as that does not raise the step's peak.

Memory that is given back to the system has to be fetched, page by page, in the next backward. Eager training pays
that for every gradient. A gradient whose memory is kept is there in the forward as well, where activations
pile up; so those that are computed first are kept first, and only while the peak stays where it is.

Why: docs/decisions.md, "Gradient memory is kept between steps".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from commfuse_fx.cost.memory import memory_profile
from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.edit import replace_all
from commfuse_fx.ir.core.meta import info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.out_variants import WRITES_INTO
from commfuse_fx.passes.declaration import Pass


@dataclass(frozen=True)
class KeepGradients(Pass):
    """`at_least`: bytes below which the allocator's own caches serve well enough."""

    name = "keep_gradients"
    numerics = "bitwise"
    requires = ("averaged",)

    at_least: int = 2**18

    def __call__(self, program: Program) -> bool:
        # The choice depends on the batch, in which ranks may differ; where they communicate, buckets keep theirs.
        if not program.updates or any(True for _ in program.collectives()):
            return False
        position = {node: i for i, node in enumerate(program.graph.nodes)}
        candidates = sorted(self._candidates(program), key=position.__getitem__)
        kept = _within_peak(candidates, position, memory_profile(program)) if candidates else []
        build = Builder(program)
        replace_all(program, {node: _write_into_kept_memory(build, node) for node in kept})
        for node in kept:
            program.graph.erase_node(node)
        return bool(kept)

    def _candidates(self, program: Program) -> list[fx.Node]:
        """Gradients that only an update reads and whose op can write into memory it is given."""
        found: dict[fx.Node, None] = {}
        for node in program.graph.nodes:
            if node.op != "call_function" or info(node).phase != "update":
                continue
            for grad in node.all_input_nodes:
                if (
                    grad.target in WRITES_INTO
                    and all(info(user).phase == "update" for user in grad.users)
                    and tensor_spec(grad).nbytes >= self.at_least
                    and tensor_spec(grad).is_contiguous
                ):
                    found[grad] = None
        return list(found)


def _within_peak(candidates: list[fx.Node], position: dict[fx.Node, int], profile: list[int]) -> list[fx.Node]:
    """The candidates, first computed first, that can be live from the start of the step without a higher peak."""
    peak = max(profile)
    kept: list[fx.Node] = []
    before, highest = 0, 0  # highest memory, kept gradients included, before the present candidate
    for node in candidates:
        at = position[node]
        highest = max([highest, *profile[before:at]])
        before = at
        size = tensor_spec(node).nbytes
        if highest + size <= peak:
            highest += size
            kept.append(node)
    return kept


def _write_into_kept_memory(build: Builder, node: fx.Node) -> fx.Node:
    spec = tensor_spec(node)
    name = info(node).name
    kwargs = {"dtype": spec.dtype, "device": torch.device(spec.device)}
    with build.before(node):
        memory = build.call(
            aten.empty.memory_format,
            (list(spec.shape),),
            kwargs,
            spec=spec,
            like=info(node),
            name=f"{name}.memory",
            kept=True,
        )
        target = WRITES_INTO[node.target]
        return build.call(
            target, node.args, {**node.kwargs, "out": memory}, spec=spec, like=info(node), name=f"{name}.out"
        )
