"""The vocabulary of collectives: which ops start one, and what waits for it.

A collective is a start and a `wait_tensor`. Groups are mesh axes written as strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.member_ops import Tables, all_gather_members, reduce_scatter_members
from commfuse_fx.ir.core.meta import CollectiveInfo, Stretch, info, tensor_spec
from commfuse_fx.ir.core.owner_ops import reduce, reduce_

c10d = torch.ops._c10d_functional

WAIT = c10d.wait_tensor.default

# start op -> (kind, position of the group argument)
_STARTS: dict[Any, tuple[str, int]] = {
    c10d.all_reduce.default: ("all_reduce", 2),
    c10d.all_reduce_.default: ("all_reduce", 2),
    c10d.all_gather_into_tensor.default: ("all_gather", 2),
    c10d.reduce_scatter_tensor.default: ("reduce_scatter", 3),
    c10d.broadcast.default: ("broadcast", 2),
    c10d.broadcast_.default: ("broadcast", 2),
    c10d.all_to_all_single.default: ("all_to_all", 3),
    reduce: ("reduce", 3),
    reduce_: ("reduce", 3),
    all_gather_members: ("all_gather", 2),
    reduce_scatter_members: ("reduce_scatter", 3),
}

_START_IDS = frozenset(map(id, _STARTS))
"""Hashing an op runs Python code of torch's, and every pass asks this of every node."""

IN_PLACE = {
    c10d.all_reduce.default: c10d.all_reduce_.default,
    c10d.broadcast.default: c10d.broadcast_.default,
    reduce: reduce_,
}

BY_MEMBERS = {
    c10d.all_gather_into_tensor.default: all_gather_members,
    c10d.reduce_scatter_tensor.default: reduce_scatter_members,
}
"""Ops on the rows of one tensor, and what does the same for several ones: its last argument are their sizes."""

# Kinds that may be merged, whoever has put them into the graph.
FUSIBLE_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "reduce")


def result_of_start(target: Any, args: Sequence[Any]) -> torch.Tensor:
    """Memory for what a start yields, laid out as the runtime lays it out: its own input for the in-place forms."""
    value: torch.Tensor = args[0]
    kind, _ = _STARTS[target]
    if target in IN_PLACE.values():
        return value
    if kind == "all_gather":
        return value.new_empty((value.shape[0] * args[1], *value.shape[1:]))
    if kind == "reduce_scatter":
        return value.new_empty((value.shape[0] // args[2], *value.shape[1:]))
    return torch.empty_like(
        value, memory_format=torch.contiguous_format if kind == "all_to_all" else torch.preserve_format
    )


def is_start(node: fx.Node) -> bool:
    """Whether a node starts a collective."""
    return node.op == "call_function" and id(node.target) in _START_IDS


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective."""
    return node.op == "call_function" and node.target is WAIT


def kind_of(node: fx.Node) -> str:
    """ "all_reduce", "all_gather", ... of a start node."""
    return _STARTS[node.target][0]


def collective_of(start: fx.Node) -> CollectiveInfo:
    """What the collective of a start does."""
    found = info(start).collective
    assert found is not None, "a start carries what its collective does"
    return found


def role_of(node: fx.Node) -> str:
    """What a collective is there for, such as "gradient"; "" of a node that starts none."""
    found = info(node).collective
    return found.role if found is not None else ""


def group_of(node: fx.Node) -> str:
    """The mesh axes of a start node."""
    group: str = node.args[_STARTS[node.target][1]]  # type: ignore[assignment]
    return group


def root_of(node: fx.Node) -> int | None:
    """The position in its group of the rank that a start sends from, or to; None where all ranks do the same."""
    kind, group = _STARTS[node.target]
    if kind not in ("broadcast", "reduce"):
        return None
    root = node.args[group - 1]
    assert isinstance(root, int)
    return root


def tables_of(start: fx.Node) -> Tables | None:
    """How the memory that an all_gather or a reduce_scatter gives or takes holds the rows of ranks; None for others."""
    kind, group = _STARTS[start.target]
    if kind not in ("all_gather", "reduce_scatter"):
        return None
    args: tuple[Any, ...] = start.args
    ways: int = args[group - 1]
    if start.target in BY_MEMBERS.values():
        return Tables(tuple(args[group + 1]), ways)
    of_a_rank = args[0] if kind == "all_gather" else start
    return Tables((tensor_spec(of_a_rank).numel,), ways)


def elements_to_send(start: fx.Node) -> int:
    """How many elements the pieces of a collective have together: where ranks give or get rows, those of one rank."""
    tables = tables_of(start)
    return tensor_spec(start).numel if tables is None else tables.all.end


def bytes_of_piece(start: fx.Node, stretch: Stretch) -> int:
    """The payload of a piece of a collective: of a gather or scatter, the rows of all ranks together."""
    tables = tables_of(start)
    return stretch.size * tensor_spec(start).itemsize * (1 if tables is None else tables.ways)


def memory_on_wire(wait: fx.Node) -> fx.Node | None:
    """The value that a collective sends from, and that must therefore keep still until this wait.

    None where the start makes a copy, or works in place on memory that the wait yields.
    """
    start = wait.args[0]
    assert isinstance(start, fx.Node)
    if not is_start(start) or kind_of(start) in ("all_reduce", "broadcast", "reduce"):
        return None
    return start.args[0]  # type: ignore[return-value]


def wait_of(start: fx.Node) -> fx.Node:
    """The wait of a start node. Raises LookupError unless there is exactly one."""
    waits = [user for user in start.users if is_wait(user)]
    if len(waits) != 1:
        raise LookupError(f"collective {start.name} ({info(start).name}) has {len(waits)} waits, not one")
    return waits[0]
