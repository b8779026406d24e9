"""Parameters that one rank of a group updates: its gradient is reduced there, and on other ranks there is nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from commfuse_fx.ir.core.builder import Builder
from commfuse_fx.ir.core.collectives import collective_of, group_of
from commfuse_fx.ir.core.meta import NodeInfo, info, tensor_spec
from commfuse_fx.ir.core.owner_ops import of_owner, reduce
from commfuse_fx.ir.rows.shard_rows import name_of_gradient


def reduce_to_owner(build: Builder, start: fx.Node, names: Sequence[str], owner: int) -> None:
    """Reduce the gradient of these parameters on the rank alone that owns them, in place of an all_reduce."""
    program, group = build.program, group_of(start)
    with build.before(start):
        made = build.call(
            reduce,
            (start.args[0], start.args[1], owner, group),
            spec=info(start).spec,
            like=info(start),
            name=f"reduce/{names[0]}/reduce",
            collective=replace(collective_of(start), kind="reduce"),
            phase="backward",
        )
    start.replace_all_uses_with(made)
    program.graph.erase_node(start)
    program.names.release(info(start).name)
    give_to_owner(build, names)


def give_to_owner(build: Builder, names: Sequence[str]) -> None:
    """Leave the gradients of these parameters to the ranks that own them: on others there is nothing."""
    program = build.program
    with build.before(program.output):
        for name in names:
            program.grads[name] = part_of_owner(build, name, program.grads[name], name_of_gradient(name))


def holds_of_owner(held: fx.Node) -> bool:
    """Whether what is held of a gradient is what the owner has of it, so that other ranks hold nothing."""
    return any(value.target is of_owner for user in held.users for value in user.all_input_nodes)


def part_of_owner(build: Builder, name: str, value: fx.Node, label: str) -> fx.Node:
    """Make what a rank has of a parameter or its gradient: all of it on the owner, and nothing on other ranks.

    label: the name of the node.
    """
    param = build.program.params[name]
    args = (value, param.owner, build.program.mesh.size(param.shard), param.shard)
    return build.call(of_owner, args, spec=tensor_spec(value), like=NodeInfo("update"), name=label)
