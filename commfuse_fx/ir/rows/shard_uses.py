"""Gathers of rows: after an update, or where a step begins to use a parameter of which ranks keep rows alone; and
broadcasts of parameters after the update by their owners.

Why: docs/decisions.md, "Parameters stay whole between steps, up to level 2".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.collectives import c10d
from commfuse_fx.ir.core.dependence import Roots, is_view, written_nodes
from commfuse_fx.ir.core.meta import CollectiveInfo, NodeInfo, TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.placement import S
from commfuse_fx.ir.core.program import Parameter, Program
from commfuse_fx.ir.rows.shard_rows import spec_of_rows


def gather_rows(build: Builder, name: str, rows: fx.Node, like: NodeInfo, again: str = "") -> fx.Node:
    """Gather the rows of a parameter from all ranks, at the insertion point. Returns the wait, with the padding.

    again: part of the names of the nodes, of a second gather of the same parameter.
    """
    param, mesh = build.program.params[name], build.program.mesh
    ways, part = mesh.size(param.shard), tensor_spec(rows)
    start = build.call(
        c10d.all_gather_into_tensor.default,
        (rows, ways, param.shard),
        spec=part.with_shape((part.shape[0] * ways, *part.shape[1:])),
        like=like,
        name=f"shard/{name}/{again}all_gather",
        collective=_collective(param, "all_gather"),
    )
    return build.wait(start, f"shard/{name}/{again}wait")


def broadcast_whole(build: Builder, name: str, like: NodeInfo) -> fx.Node:
    """Send a parameter from its owner to all ranks, at the insertion point. Returns the wait."""
    param = build.program.params[name]
    start = build.call(
        c10d.broadcast.default,
        (build.program.placeholder("parameter", name), param.owner, param.shard),
        spec=param.spec,
        like=like,
        name=f"shard/{name}/broadcast",
        collective=_collective(param, "broadcast"),
    )
    return build.wait(start, f"shard/{name}/wait")


def _collective(param: Parameter, kind: str) -> CollectiveInfo:
    return CollectiveInfo(
        kind,
        group=param.shard,
        dtype=param.spec.dtype,
        nbytes=param.spec.nbytes,
        members=(param.name,),
        sequence=param.sequence,
        fusion_id=param.fusion_id,
        role="parameter",
    )


def without_padding(
    build: Builder, name: str, gathered: fx.Node, spec: TensorSpec, like: NodeInfo, again: str = ""
) -> fx.Node:
    """The parameter of this spec in what was gathered."""
    if tensor_spec(gathered).shape == spec.shape:
        return gathered
    args = (gathered, 0, 0, spec.shape[0])
    return build.call(aten.narrow.default, args, spec=spec, like=like, name=f"shard/{name}/{again}without_padding")


def keep_rows(build: Builder, name: str) -> None:
    """Let ranks keep their rows of a parameter alone, which are gathered in front of the first node of the forward
    that reads the parameter, and once more in front of the first one of the backward."""
    program = build.program
    param, rows = program.params[name], program.placeholder("parameter", name)
    spec = spec_of_rows(param, program.mesh)
    if rows is not None:
        if rows.users:
            _gather_for(build, name, rows, sorted(rows.users))
        info(rows).spec = spec
    program.params[name] = replace(
        param,
        spec=spec,
        whole=param.whole or param.spec,
        layout=(*param.layout, (param.shard, S(0))),
        shard="",
        rows_alone=True,
    )


def _gather_for(build: Builder, name: str, rows: fx.Node, users: Sequence[fx.Node]) -> None:
    """Gather a parameter in front of the first of these nodes, which are in graph order."""
    program = build.program
    whole = _gathered(build, name, rows, users[0])
    for user in users:
        user.replace_input_with(rows, whole)
    program.aux = {path: whole if node is rows else node for path, node in program.aux.items()}
    later = _later_users(whole)
    if later and info(users[0]).phase != "backward":
        _use_again(build, name, rows, whole, later)


def _gathered(build: Builder, name: str, rows: fx.Node, user: fx.Node, again: str = "") -> fx.Node:
    """All of the parameter, gathered in front of a node that uses it."""
    spec, like = build.program.params[name].spec, NodeInfo(info(user).phase, source=info(user).source)
    info(rows).spec = spec_of_rows(build.program.params[name], build.program.mesh)
    with build.before(user):
        wait = gather_rows(build, name, rows, like, again)
        return without_padding(build, name, wait, spec, like, again)


def _later_users(whole: fx.Node) -> list[fx.Node]:
    """The nodes of the backward that use a parameter, or views and casts of it that the forward has made; in order."""
    found: dict[fx.Node, None] = {}
    known = [whole]
    for node in known:
        for user in node.users:
            if info(user).phase == "backward":
                found[user] = None
            elif _is_made_again(user):
                known.append(user)
    return sorted(found)


def _is_made_again(node: fx.Node) -> bool:
    """Whether the backward makes this node of the forward once more, as a gather is most of what it takes: views, and
    casts, which autocast makes of whole parameters."""
    return is_view(node) or node.target is aten._to_copy.default


def _use_again(build: Builder, name: str, rows: fx.Node, whole: fx.Node, users: Sequence[fx.Node]) -> None:
    """Gather a parameter once more for these nodes, and make the views and casts that they use once more."""
    same = {whole: _gathered(build, name, rows, users[0], "again/")}

    def made(node: fx.Node) -> fx.Node:
        if node not in same:
            like = NodeInfo("backward", module=info(node).module, source=info(node).source)
            args = fx.node.map_arg(node.args, lambda value: made(value) if _leads_to(value, whole) else value)
            label = f"shard/{name}/again/{info(node).name.rpartition('/')[2]}"
            with build.before(users[0]):
                same[node] = build.call(node.target, args, node.kwargs, spec=info(node).spec, like=like, name=label)
        return same[node]

    for user in users:
        for value in user.all_input_nodes:
            if _leads_to(value, whole):
                user.replace_input_with(value, made(value))


def _leads_to(node: fx.Node, whole: fx.Node) -> bool:
    """Whether a node is a parameter, or a view or cast of it."""
    while node is not whole:
        if not _is_made_again(node):
            return False
        node = node.all_input_nodes[0]
    return True


def written_by_model(program: Program) -> dict[str, None]:
    """The parameters that the model itself writes: whoever has gathered one would write to a copy."""
    roots = Roots(program.graph, program.aliases())
    written = dict.fromkeys(roots[value] for node in program.graph.nodes for value in written_nodes(node))
    return dict.fromkeys(name for name in program.params if program.placeholder("parameter", name) in written)
