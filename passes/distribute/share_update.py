"""Divide updates among the ranks whose gradients are inputs: each rank updates its rows, or the parameters it owns.

Why: docs/decisions.md, "The update of a module is a graph of its own".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from commfuse_fx.config.parallel_optimizer import BROADCAST, SCATTER
from commfuse_fx.ir.core.builder import Builder
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.rows.shard_owners import give_to_owner
from commfuse_fx.ir.rows.shard_rows import sharing_ranks
from commfuse_fx.ir.rows.shard_uses import keep_rows
from commfuse_fx.ir.updates.update_sharing import (
    SHARED,
    WHOLE,
    Sharing,
    divided_by_rule,
    in_rows,
    refuse_unknown,
    who_updates,
)
from commfuse_fx.passes.declaration import Pass, Situation
from commfuse_fx.solvers.buckets.assign_owners import assign_owners


@dataclass(frozen=True)
class ShareUpdate(Pass):
    """The update of a module, whose backward has reduced the gradients: they are whole, and the same on all ranks.
    `update_parameters` takes the rows of them that a rank needs, and `gather_parameters` gathers what is updated.

    What is shared does not depend on which parameters have a gradient, since states stay where they are.

    threshold, pad, ranks, mode: as in `ShardOptimizer`. by_rule: whether the module divides gradients, too, and so
    which. keep_rows: whether it divides parameters as well. Ranks then have rows alone, which the update works on as
    they are.
    """

    name = "share_update"
    numerics = "defines"
    requires = ("simplified",)
    ensures = ("reduced", "sharded")

    threshold: int = 64
    pad: bool = False
    ranks: int = 0
    mode: str = SCATTER
    by_rule: bool = False
    keep_rows: bool = False

    @classmethod
    def when(cls, situation: Situation) -> ShareUpdate | None:
        asked = situation.config.parallel_optimizer
        if situation.gradients != "given":
            return None
        if asked is None:
            return cls(ranks=1)
        levels = situation.scatters_gradients, situation.keeps_rows
        return cls(asked.parallel_optimizer_threshold, asked.pad, asked.sharing, asked.mode, *levels)

    def __call__(self, program: Program) -> bool:
        if program.optimizer is None or program.mesh.world == 1:
            return False
        refuse_unknown(program.optimizer, "ShardedOptimizer", "use it as it is")
        names, mesh, by_owners = self._shared(program), program.mesh, self.mode == BROADCAST
        if not names:
            return False
        if self.keep_rows:
            _have_rows(program, names)
            return True
        group = sharing_ranks(mesh, mesh.all_axes, self.ranks)
        sizes = [program.params[name].spec.nbytes for name in names]
        owners = assign_owners(sizes, mesh.size(group)) if by_owners else [None] * len(names)
        for name, owner in zip(names, owners, strict=True):
            param = program.params[name] = replace(program.params[name], shard=group, owner=owner)
            program.note(SHARED, name, who_updates(param, mesh))
        if by_owners:
            give_to_owner(Builder(program), [name for name in names if name in program.grads])
            program.set_output()
        return True

    def _shared(self, program: Program) -> list[str]:
        """The parameters whose updates are shared. Notes say why others are not."""
        assert program.optimizer is not None
        held = dict.fromkeys(name for group in program.optimizer.groups for name in group.params)
        sharing = Sharing(self.threshold, self.pad, self.ranks, self.mode == BROADCAST)
        found: list[str] = []
        by_rule = divided_by_rule(program.params, program.mesh, program.config) if self.by_rule else {}
        for name, param in program.params.items():
            if self.keep_rows and not by_rule[name]:
                found.append(name)
                continue
            if name not in held:
                continue
            reason = by_rule[name] if by_rule else sharing.why_not(param, program.mesh, program.mesh.all_axes)
            if program.config.parallel_mode == "hybrid_parallel" and param.layerwise_parallel:
                reason = "its gradient is not reduced over several ranks"
            if reason:
                program.note(WHOLE, name, reason)
            else:
                found.append(name)
        return found


def _have_rows(program: Program, names: list[str]) -> None:
    """The module has divided these parameters."""
    build = Builder(program)
    for name in names:
        param = program.params[name] = in_rows(program.params[name], program.mesh, program.config)
        program.note(SHARED, name, who_updates(param, program.mesh))
        keep_rows(build, name)
