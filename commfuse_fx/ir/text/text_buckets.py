"""What canonical text says of collectives beyond their line: whom they serve, and how buckets are put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.collectives import IN_PLACE, collective_of, elements_to_send, is_wait, tables_of
from commfuse_fx.ir.core.member_ops import reduce_scatter_members
from commfuse_fx.ir.core.meta import CollectiveInfo, Part, Stretch, info
from commfuse_fx.ir.core.naming import parameter_of
from commfuse_fx.ir.core.program import Program

aten = torch.ops.aten


def describe_collectives(program: Program) -> None:
    """Roles, sequence numbers and fusion ids; the parts of buckets, and what writes into them."""
    buffers = [source.name for source in program.sources.values() if source.kind == "buffer"]
    others = len(program.params)
    for start in program.collectives():
        details, collective = info(start), collective_of(start)
        role = _role(program, collective, buffers, details.phase)
        if role in ("gradient", "rows", "parameter"):
            sequence = min(program.params[name].sequence for name in _parameters(program, collective))
        elif role == "buffer":
            sequence = min(map(buffers.index, collective.members))
        else:
            sequence, others = others, others + len(collective.members)
        details.collective = replace(collective, role=role, sequence=sequence)
        if role in ("gradient", "parameter") and collective.fusion_id is not None:
            for name in _parameters(program, collective):
                program.params[name] = replace(program.params[name], fusion_id=collective.fusion_id)
        details.parts = _parts(start, details.collective)
        details.writes = _writes(start)


def _role(program: Program, collective: CollectiveInfo, buffers: Sequence[str], phase: str) -> str:
    members = collective.members
    if members and len(_parameters(program, collective)) == len(members):
        if members[0].startswith("rows/"):
            return "rows"
        return "parameter" if collective.kind in ("all_gather", "broadcast") else "gradient"
    if members and all(name in buffers for name in members):
        return "buffer"
    if phase == "update":
        return "norm"
    return "redistribution" if program.config.divides_graphs else "user"


def _parameters(program: Program, collective: CollectiveInfo) -> list[str]:
    """The parameter that each member belongs to; members that belong to none are left out."""
    names = []
    for member in collective.members:
        numbers = member.startswith("rows/") and member.endswith("/numbers")
        name = member.removeprefix("rows/").removesuffix("/numbers") if numbers else parameter_of(member)
        if name in program.params:
            names.append(name)
    return names


def _parts(start: fx.Node, collective: CollectiveInfo) -> tuple[Part, ...]:
    """The members of a collective on a concatenation: each with what it reduces, and with its result."""
    label = info(start).name.rpartition("/")[0]
    concat = start.args[0]
    if not isinstance(concat, fx.Node) or info(concat).name != f"{label}/concat":
        return ()
    results = _results(start, label)
    values: list[Any] = concat.args[0]  # type: ignore[assignment]
    if not len(values) == len(results) == len(collective.members):
        return ()
    flat = [value.args[0] if info(value).name.startswith(f"{label}/") else value for value in values]
    return tuple(
        Part((name,), value, result) for name, value, result in zip(collective.members, flat, results, strict=True)
    )


def _results(start: fx.Node, label: str) -> list[fx.Node]:
    """The results of the members, in their order: `bucket.0/restore.0`, ..."""
    found: dict[int, fx.Node] = {}
    reached = [user for user in start.users if is_wait(user)]
    for node in reached:
        for user in node.users:
            name, _, number = info(user).name.rpartition(".")
            if name == f"{label}/restore" and number.isdecimal():
                found[int(number)] = user
            elif info(user).name.startswith(f"{label}/"):
                reached.append(user)
    return [found[number] for number in sorted(found)]


def _writes(start: fx.Node) -> tuple[tuple[fx.Node, Stretch], ...]:
    """What fills which stretch of the flat storage that is reduced. A stretch reaches to the next one."""
    storage, tables = start.args[0], tables_of(start)
    ways = 1 if tables is None else tables.ways
    if start.target not in (*IN_PLACE.values(), reduce_scatter_members) or not isinstance(storage, fx.Node):
        return ()
    if storage.target is not aten.empty.memory_format:
        return ()
    padding = f"{info(start).name.rpartition('/')[0]}/padding."
    found: list[tuple[int, fx.Node]] = [(0, user) for user in storage.users if _fills(user, storage)]
    for place in storage.users:
        if place.target is aten.as_strided.default and len(place.args) == 4 and isinstance(place.args[3], int):
            if not info(place).name.startswith(padding):
                found += [(place.args[3] // ways, user) for user in place.users if _fills(user, place)]
    found.sort(key=lambda each: each[0])
    ends = [*(begin for begin, _ in found), elements_to_send(start)][1:]
    return tuple((node, Stretch(begin, end)) for (begin, node), end in zip(found, ends, strict=True))


def _fills(node: fx.Node, place: fx.Node) -> bool:
    return node.kwargs.get("out") is place or (node.target is aten.copy_.default and node.args[0] is place)
