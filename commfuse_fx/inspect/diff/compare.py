"""Classifies the differences between two aligned graphs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest

from commfuse_fx.inspect.diff.align import NOBODY, Alignment, align
from commfuse_fx.inspect.diff.graph_diff import GraphDiff
from commfuse_fx.inspect.diff.records import Argument, CollectiveRecord, GraphRecord, NodeRecord
from commfuse_fx.inspect.diff.result import (
    COMMUNICATION,
    COMPUTE,
    KINDS,
    RENAMED,
    REORDERED,
    CollectiveChange,
    Delta,
    HeaderChange,
    NodeChange,
)
from commfuse_fx.inspect.diff.sequence import increasing

# What passes make around collectives. Modules could have such names too, but not with these nodes in them.
_MADE_FOR_BUCKETS = re.compile(r"bucket\.\d+/(storage|in_place|reduced|(place|padding)\..*)", re.DOTALL)
_WRITES = re.compile(r"bucket\.\d+/write\..*", re.DOTALL)
_MADE_FOR_UPDATES = re.compile(r"update\.\d+(\.|/grads\.).*", re.DOTALL)
_OF_COMPUTE = re.compile(r"computed once|region \d+(, rounded)?")  # remarks; all others are on communication
_VIEWS = ("aten.view", "aten.as_strided", "aten.reshape", "aten.alias")
_LONGEST = 240

_FIELDS = {"group": "group", "reduce_op": "op", "dtype": "dtype", "nbytes": "bytes", "fusion_id": "fusion_id"}


def compare(a: GraphRecord, b: GraphRecord, times: Sequence[Delta] = ()) -> GraphDiff:
    """Align two graphs and list what differs. `times` are deltas that records cannot tell."""
    found = align(a.nodes, b.nodes)
    one, other = _Side(a.nodes), _Side(b.nodes)
    changed: list[NodeChange] = []
    renamed: list[NodeChange] = []
    renumbered: list[NodeChange] = []
    for j, i in enumerate(found.to_a):
        if i == NOBODY:
            continue
        before, after = a.nodes[i], b.nodes[j]
        change = _Pair(before, after, found, one, other).change()
        if change is not None:
            changed.append(change)
        elif before.name != after.name:
            same_place = (before.module, before.leaf) == (after.module, after.leaf)
            (renumbered if same_place else renamed).append(NodeChange(before.name, after.name, after.op, RENAMED))
    return GraphDiff(
        before=a.label,
        after=b.label,
        nodes=(len(a.nodes), len(b.nodes)),
        header=_header(a, b),
        added=tuple(NodeChange("", b.nodes[j].name, b.nodes[j].op, other.kind(b.nodes[j])) for j in found.free_b()),
        removed=tuple(NodeChange(a.nodes[i].name, "", a.nodes[i].op, one.kind(a.nodes[i])) for i in found.free_a()),
        changed=tuple(changed),
        renamed=tuple(renamed),
        renumbered=tuple(renumbered),
        moved=_moved(found),
        collectives=_collectives(found),
        deltas=(*_figures(a, b), *times),
    )


class _Side:
    """One graph, and which of its nodes serve communication."""

    def __init__(self, nodes: Sequence[NodeRecord]) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.users: dict[str, list[NodeRecord]] = {}
        for node in nodes:
            for name in node.operands:
                self.users.setdefault(name, []).append(node)

    def kind(self, node: NodeRecord) -> str:
        """The class of a change to this node."""
        if serves_communication(node):
            return COMMUNICATION
        # A view moves no data: one that only shapes what is sent is part of the sending.
        users = self.users.get(node.name, ())
        shapes = node.base_op in _VIEWS and users and all(serves_communication(user) for user in users)
        return COMMUNICATION if shapes else COMPUTE

    def is_layout(self, name: str) -> bool:
        """A value whose memory is laid out for communication, or a parameter, which may lie in such memory."""
        node = self.nodes[name]
        return serves_communication(node) or (node.op == "input" and node.arguments[0].pattern == "parameter")


def serves_communication(node: NodeRecord) -> bool:
    """It is a collective, a wait, or memory that is laid out for one."""
    if node.collective is not None or node.op.endswith("wait_tensor"):
        return True
    if node.op == "input" or node.module.startswith("update."):
        return _MADE_FOR_UPDATES.fullmatch(node.name) is not None
    if _WRITES.fullmatch(node.name):
        return node.base_op == "aten.copy"  # other ops compute the gradient, only in this place
    return _MADE_FOR_BUCKETS.fullmatch(node.name) is not None


@dataclass(frozen=True)
class _Pair:
    before: NodeRecord
    after: NodeRecord
    found: Alignment
    one: _Side
    other: _Side

    def change(self) -> NodeChange | None:
        """What differs except for name and place."""
        before, after = self.before, self.after
        kind = max(self.one.kind(before), self.other.kind(after), key=KINDS.index)
        details: list[tuple[str, str]] = []
        if before.phase != after.phase:
            details.append((kind, f"phase: {before.phase} -> {after.phase}"))
        if before.op != after.op:
            writes = any(each.is_out for each in (*before.arguments, *after.arguments))
            rerouted = writes and before.base_op == after.base_op
            details.append((COMMUNICATION if rerouted else kind, f"op: {before.op} -> {after.op}"))
        if before.value != after.value:
            details.append((kind, f"value: {before.value} -> {after.value}"))
        details.extend(self._arguments(kind))
        details.extend((COMMUNICATION, text) for text in collective_details(before.collective, after.collective))
        details.extend(self._extras())
        if not details:
            return None
        strongest = max((each for each, _ in details), key=KINDS.index)
        return NodeChange(before.name, after.name, after.op, strongest, tuple(_clip(text) for _, text in details))

    def _same(self, old: Argument, new: Argument) -> bool:
        return old.pattern == new.pattern and old.operands == tuple(map(self.found.partner, new.operands))

    def _arguments(self, kind: str) -> list[tuple[str, str]]:
        details = []
        for number, (old, new) in enumerate(zip_longest(self.before.arguments, self.after.arguments)):
            if old is None or new is None:
                present = new or old
                assert present is not None
                side, word = (self.other, "added") if old is None else (self.one, "removed")
                is_layout = bool(present.operands) and all(map(side.is_layout, present.operands))
                where = COMMUNICATION if present.is_out and is_layout else kind
                details.append((where, f"argument {number} {word}: {present}"))
            elif not self._same(old, new):
                where = COMMUNICATION if self._is_rerouted(old, new) else kind
                details.append((where, f"argument {number}: {old} -> {self._marked(new)}"))
        return details

    def _is_rerouted(self, old: Argument, new: Argument) -> bool:
        """The same values from other memory: all that differs is what lies there for communication."""
        if _words(old) != _words(new) or not (old.operands or new.operands):
            return False
        kept = {name for name in map(self.found.partner, new.operands) if name is not None} & {*old.operands}
        gone = [name for name in old.operands if name not in kept]
        come = [name for name in new.operands if self.found.partner(name) not in kept]
        if not gone and not come:
            return self.after.phase == "update"  # another order of the same
        return all(map(self.one.is_layout, gone)) and all(map(self.other.is_layout, come))

    def _marked(self, argument: Argument) -> str:
        alone = len(argument.operands) == 1 and self.found.partner(argument.operands[0]) is None
        return f"{argument} (added)" if alone else str(argument)

    def _extras(self) -> list[tuple[str, str]]:
        details = []
        for old, new in zip_longest(self.before.extras, self.after.extras):
            computes = all(each is None or _OF_COMPUTE.fullmatch(each.pattern) for each in (old, new))
            kind = COMPUTE if computes else COMMUNICATION
            if old is None or new is None:
                details.append((kind, f"no longer {old}" if new is None else f"now {new}"))
            elif not self._same(old, new):
                details.append((kind, f"{old} -> {new}"))
        return details


def collective_details(before: CollectiveRecord | None, after: CollectiveRecord | None) -> list[str]:
    """What differs between two collectives, members last."""
    if before is None or after is None:
        return [] if before is after else ["is a collective now" if before is None else "is no collective any more"]
    details = []
    for field in fields(CollectiveRecord):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if old != new and field.name != "members":
            details.append(f"{_FIELDS.get(field.name, field.name)}: {old} -> {new}")
    if before.members != after.members:
        details.append(f"members: [{', '.join(before.members)}] -> [{', '.join(after.members)}]")
    return details


def _words(argument: Argument) -> str:
    """The text apart from references and lists of them."""
    return re.sub(r"[%\[\], ]", "", argument.pattern)


def _clip(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def _header(a: GraphRecord, b: GraphRecord) -> tuple[HeaderChange, ...]:
    names = dict.fromkeys((*a.header, *b.header))
    return tuple(
        HeaderChange(name, a.header.get(name), b.header.get(name))
        for name in names
        if a.header.get(name) != b.header.get(name)
    )


def _moved(found: Alignment) -> tuple[NodeChange, ...]:
    pairs = [(i, j) for j, i in enumerate(found.to_a) if i != NOBODY]
    kept = set(increasing([i for i, _ in pairs]))
    return tuple(
        NodeChange(
            found.a[i].name,
            found.b[j].name,
            found.b[j].op,
            REORDERED,
            (f"at node {j}, after {found.b[j - 1].name if j else 'nothing'}",),
        )
        for k, (i, j) in enumerate(pairs)
        if k not in kept
    )


def _collectives(found: Alignment) -> tuple[CollectiveChange, ...]:
    """Collectives of `b` in their order, then those that only `a` has."""
    changes = []
    for j, i in enumerate(found.to_a):
        old = None if i == NOBODY else found.a[i]
        was, now = None if old is None else old.collective, found.b[j].collective
        if was != now:
            name = "" if old is None or was is None else old.name
            changes.append(_collective(name, "" if now is None else found.b[j].name, was, now))
    for i in found.free_a():
        if found.a[i].collective is not None:
            changes.append(_collective(found.a[i].name, "", found.a[i].collective, None))
    return tuple(changes)


def _collective(
    before: str, after: str, was: CollectiveRecord | None, now: CollectiveRecord | None
) -> CollectiveChange:
    details = [text for text in collective_details(was, now) if was and now and not text.startswith("members: ")]
    only = now or was
    if (was is None or now is None) and only is not None:
        details = [f"{only.kind}, group {only.group}, {only.nbytes} bytes"]
    return CollectiveChange(before, after, was.members if was else (), now.members if now else (), tuple(details))


def _figures(a: GraphRecord, b: GraphRecord) -> tuple[Delta, ...]:
    old, new = _counted(a), _counted(b)
    names = dict.fromkeys(("collectives", *sorted({**old, **new})))
    return tuple(Delta(name, old[name], new[name]) for name in names)


def _counted(graph: GraphRecord) -> Counter[str]:
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        if node.collective is not None:
            counts["collectives"] += 1
            counts[f"collectives.{node.phase}"] += 1
            counts[f"bytes.{node.collective.kind}"] += node.collective.nbytes
            counts[f"bytes.{node.collective.kind}.{node.phase}"] += node.collective.nbytes
    return counts
