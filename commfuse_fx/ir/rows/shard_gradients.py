"""Reductions of gradients whose rows are divided among the ranks."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.collectives import c10d, collective_of, is_start, is_wait, kind_of
from commfuse_fx.ir.core.meta import info, tensor_spec
from commfuse_fx.ir.core.program import Parameter, Program
from commfuse_fx.ir.rows.shard_rows import padding_of, spec_of_rows

ON_CPU = "an all_to_all of rows and their sum, since Gloo's reduce_scatter would send all rows to all ranks"

_ELEMENTWISE = (aten._to_copy.default, aten.clone.default)


def reduction(grad: fx.Node) -> fx.Node | None:
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


def serves_only(start: fx.Node, program: Program) -> bool:
    """Whether all that follows from a reduction are gradients."""
    chain = _chain(start)
    known = dict.fromkeys((*chain, program.output))
    return not any(user not in known for node in chain for user in node.users)


def scatter(build: Builder, start: fx.Node, names: list[str], group: str) -> None:
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
