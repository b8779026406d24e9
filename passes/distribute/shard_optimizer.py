"""Divide updates among the ranks: of each reduced gradient a rank gets the rows that it updates, or all, or none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import fx

from commfuse_fx.config.parallel_optimizer import BROADCAST, SCATTER
from commfuse_fx.ir.builder import Builder, aten
from commfuse_fx.ir.collectives import c10d, collective_of, group_of, is_start, is_wait, kind_of
from commfuse_fx.ir.dependence import Roots, written_nodes
from commfuse_fx.ir.meta import info, tensor_spec
from commfuse_fx.ir.program import Parameter, Program
from commfuse_fx.ir.shard_owners import reduce_to_owner
from commfuse_fx.ir.shard_rows import padding_of, sharing_ranks, spec_of_rows
from commfuse_fx.ir.shard_uses import keep_rows
from commfuse_fx.ir.update_sharing import SHARED, WHOLE, Sharing, refuse_unknown, who_updates
from commfuse_fx.passes.declaration import Pass, Situation
from commfuse_fx.solvers.assign_owners import assign_owners

ON_CPU = "an all_to_all of rows and their sum, since Gloo's reduce_scatter would send all rows to all ranks"

_ELEMENTWISE = (aten._to_copy.default, aten.clone.default)


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
        written = _written(program) if self.keep_rows else {}
        for start, names in found.items():
            group = sharing_ranks(program.mesh, group_of(start), self.ranks)
            for name in names:
                param = program.params[name] = replace(program.params[name], shard=group, owner=owners.get(start))
                whole = "; it stays whole between steps, as the model itself writes to it" if name in written else ""
                program.note(SHARED, name, f"{who_updates(param, program.mesh)}{whole}")
            if start in owners:
                reduce_to_owner(build, start, names, owners[start])
                continue
            _scatter(build, start, names, group)
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
            start = _reduction(grad)
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
        if tensor_spec(start).shape != param.spec.shape or not _serves_only(start, program):
            return "its gradient is reduced together with other values"
        return ""


def _reduction(grad: fx.Node) -> fx.Node | None:
    """The all_reduce that a gradient comes from, through casts and copies."""
    while grad.target in _ELEMENTWISE:
        grad = grad.all_input_nodes[0]
    if not is_wait(grad):
        return None
    start = grad.all_input_nodes[0]
    return start if is_start(start) and kind_of(start) == "all_reduce" else None


def _chain(start: fx.Node) -> list[fx.Node]:
    """The wait of a start, and the casts and copies that follow from it."""
    found = [user for user in start.users if is_wait(user)]
    for node in found:
        found.extend(user for user in node.users if user.target in _ELEMENTWISE)
    return found


def _serves_only(start: fx.Node, program: Program) -> bool:
    """Whether all that follows from a reduction are gradients."""
    chain = _chain(start)
    known = dict.fromkeys((*chain, program.output))
    return not any(user not in known for node in chain for user in node.users)


def _written(program: Program) -> dict[str, None]:
    """The parameters that the model itself writes: whoever has gathered one would write to a copy."""
    roots = Roots(program.graph, program.aliases())
    written = dict.fromkeys(roots[value] for node in program.graph.nodes for value in written_nodes(node))
    return dict.fromkeys(name for name in program.params if program.placeholder("parameter", name) in written)


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


def _scatter(build: Builder, start: fx.Node, names: list[str], group: str) -> None:
    """Reduce and scatter the rows of a gradient over `group`, in place of reducing all of them on every rank."""
    program = build.program
    param: Parameter = program.params[names[0]]
    mesh, details = program.mesh, collective_of(start)
    others = mesh.other_axes(details.group, group)
    value, op = start.args[0], start.args[1]
    assert isinstance(value, fx.Node)
    rows, padding = spec_of_rows(param, mesh), padding_of(param, mesh)
    wire = rows.with_dtype(details.dtype)
    with build.before(start):
        if padding:
            value = build.padded(value, padding, info(start), f"shard/{names[0]}/padded_gradient")
        made = build.call(
            c10d.reduce_scatter_tensor.default,
            (value, op, mesh.size(group), group),
            spec=wire,
            like=info(start),
            name=f"reduce/{names[0]}/reduce_scatter",
            collective=replace(details, kind="reduce_scatter", group=group),
            phase="backward",
        )
    chain = _chain(start)
    if others:
        with build.before(chain[0]):
            part = build.wait(made, f"reduce/{names[0]}/rows")
            made = build.call(
                c10d.all_reduce.default,
                (part, op, others),
                spec=wire,
                like=info(start),
                name=f"reduce/{names[0]}/rows/all_reduce",
                collective=replace(details, group=others, nbytes=wire.nbytes),
                phase="backward",
            )
    for node in chain:
        info(node).spec = rows.with_dtype(tensor_spec(node).dtype)
    start.replace_all_uses_with(made)
    program.graph.erase_node(start)
    program.names.release(info(start).name)
