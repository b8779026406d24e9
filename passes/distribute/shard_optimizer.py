"""Divide updates among the ranks: of each reduced gradient a rank gets the rows that it updates, or all, or none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import fx

from commfuse_fx.config.parallel_optimizer import BROADCAST, SCATTER
from commfuse_fx.ir.core.builder import Builder
from commfuse_fx.ir.core.collectives import group_of
from commfuse_fx.ir.core.meta import tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.rows.shard_gradients import ON_CPU, reduction, scatter, serves_only
from commfuse_fx.ir.rows.shard_owners import reduce_to_owner
from commfuse_fx.ir.rows.shard_rows import sharing_ranks
from commfuse_fx.ir.rows.shard_uses import keep_rows, written_by_model
from commfuse_fx.ir.updates.update_sharing import SHARED, WHOLE, Sharing, refuse_unknown, who_updates
from commfuse_fx.passes.declaration import Pass, Situation
from commfuse_fx.solvers.buckets.assign_owners import assign_owners


@dataclass(frozen=True)
class ShardOptimizer(Pass):
    """The all_reduce of a gradient becomes a reduce_scatter of its rows (Rajbhandari et al., "ZeRO: memory
    optimizations toward training trillion parameter models", 2020). `gather_parameters` gathers what is updated.

    Where rows are divided among a part of the ranks only, each rank then sums its rows with those ranks of the other
    parts that have the same ones.

    threshold: KiB that a parameter must have at least. pad: whether rows that do not divide are padded. keep_rows:
    whether ranks keep their rows of the parameter alone (stage 3). These are then gathered where the forward and the
    backward begin to use them; a parameter that the model itself writes stays whole. ranks: how many neighbouring
    ranks share the update of a parameter; 0: all that its gradient is reduced over. mode: "broadcast" gives whole
    parameters to one rank each, in place of rows to every rank.
    """

    name = "shard_optimizer"
    numerics = "defines"
    requires = ("reduced",)
    ensures = ("sharded",)

    threshold: int = 64
    pad: bool = False
    keep_rows: bool = False
    ranks: int = 0
    mode: str = SCATTER

    @classmethod
    def when(cls, situation: Situation) -> ShardOptimizer | None:
        asked = situation.config.parallel_optimizer
        if asked is None or situation.gradients == "given":
            return None
        if situation.holds_gradients and not situation.shards_micro_batches:
            return None
        return cls(asked.parallel_optimizer_threshold, asked.pad, situation.keeps_rows, asked.sharing, asked.mode)

    def __call__(self, program: Program) -> bool:
        if program.optimizer is None or not program.grads or program.mesh.world == 1:
            return False
        refuse_unknown(program.optimizer, "enable_parallel_optimizer=True", "leave enable_parallel_optimizer out")
        held = dict.fromkeys(name for group in program.optimizer.groups for name in group.params)
        build, found = Builder(program), dict(self._reductions(program, held))
        owners = _owners(program, found) if self.mode == BROADCAST else {}
        written = written_by_model(program) if self.keep_rows else {}
        for start, names in found.items():
            group = sharing_ranks(program.mesh, group_of(start), self.ranks)
            for name in names:
                param = program.params[name] = replace(program.params[name], shard=group, owner=owners.get(start))
                whole = "; it stays whole between steps, as the model itself writes to it" if name in written else ""
                program.note(SHARED, name, f"{who_updates(param, program.mesh)}{whole}")
            if start in owners:
                reduce_to_owner(build, start, names, owners[start])
                continue
            scatter(build, start, names, group)
            if self.keep_rows:
                for name in (name for name in names if name not in written):
                    keep_rows(build, name)
        if any(start not in owners and tensor_spec(start).device == "cpu" for start in found):
            program.note("on CPU", "reduce_scatter", ON_CPU)
        program.set_output()
        return bool(found)

    def _reductions(self, program: Program, held: dict[str, None]) -> Iterator[tuple[fx.Node, list[str]]]:
        """The starts that reduce gradients of parameters to divide, each with their names."""
        names_of: dict[fx.Node, list[str]] = {}
        for name, grad in program.grads.items():
            start = reduction(grad)
            if name not in held:
                continue
            if start is None:
                program.note(WHOLE, name, "its gradient is not reduced over several ranks")
            else:
                names_of.setdefault(start, []).append(name)
        for start, names in names_of.items():
            reasons = {name: self._why_not(program, start, name) for name in names}
            if any(reasons.values()):
                for name, reason in reasons.items():
                    program.note(WHOLE, name, reason or "its gradient is also that of a parameter which is not divided")
            else:
                yield start, names

    def _why_not(self, program: Program, start: fx.Node, name: str) -> str:
        """Why the update of a parameter is not divided; "" if it is."""
        param = program.params[name]
        sharing = Sharing(self.threshold, self.pad, self.ranks, self.mode == BROADCAST)
        if reason := sharing.why_not(param, program.mesh, group_of(start)):
            return reason
        if tensor_spec(start).shape != param.spec.shape or not serves_only(start, program):
            return "its gradient is reduced together with other values"
        return ""


def _owners(program: Program, found: Mapping[fx.Node, list[str]]) -> dict[fx.Node, int]:
    """Which rank of its group gets the sum of each of these starts: all ranks update about as many bytes. Parameters
    of one fusion id have one owner, as they are sent together."""
    params = program.params
    by_group: dict[str, dict[object, list[fx.Node]]] = {}
    for start in sorted(found, key=lambda start: min(params[name].sequence for name in found[start])):
        together = params[found[start][0]].fusion_id or start
        by_group.setdefault(group_of(start), {}).setdefault(together, []).append(start)
    owners: dict[fx.Node, int] = {}
    for group, items in by_group.items():
        sizes = [
            sum(params[name].spec.nbytes for start in starts for name in found[start]) for starts in items.values()
        ]
        for starts, owner in zip(items.values(), assign_owners(sizes, program.mesh.size(group)), strict=True):
            owners.update(dict.fromkeys(starts, owner))
    return owners
