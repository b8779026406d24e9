"""Which node of one graph is which node of the other.

Two alignments are made. The first trusts names: nodes of one name and op, then module path, op and value, then the
rest. The second trusts structure: it looks at what nodes compute and in which order, and at names only to break ties;
it is right where a module was inserted and all behind it have other paths. The one with fewer differences is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property

from commfuse_fx.inspect.diff.records import NodeRecord
from commfuse_fx.inspect.diff.sequence import common

Key = Callable[[NodeRecord], Hashable]
Nodes = tuple[NodeRecord, ...]

NOBODY = -1

# A name says less than what is computed: so many renamed nodes are as bad as one that differs.
_RENAMED_PER_CHANGE = 50


class Alignment:
    """`to_a[j]` is the position in `a` of node j of `b`, `to_b` the reverse; NOBODY where there is none."""

    def __init__(self, a: Nodes, b: Nodes) -> None:
        self.a, self.b = a, b
        self.place_a = {node.name: i for i, node in enumerate(a)}
        self.place_b = {node.name: j for j, node in enumerate(b)}
        self.to_a = [NOBODY] * len(b)
        self.to_b = [NOBODY] * len(a)

    def pair(self, i: int, j: int) -> None:
        self.to_a[j], self.to_b[i] = i, j

    def partner(self, name: str) -> str | None:
        """The name in `a` of the node that `b` calls `name`."""
        i = self.to_a[self.place_b[name]]
        return None if i == NOBODY else self.a[i].name

    @cached_property
    def operands_a(self) -> list[tuple[int, ...]]:
        return [tuple(self.place_a[name] for name in node.operands) for node in self.a]

    @cached_property
    def operands_b(self) -> list[tuple[int, ...]]:
        return [tuple(self.place_b[name] for name in node.operands) for node in self.b]

    def free_a(self) -> list[int]:
        return [i for i, j in enumerate(self.to_b) if j == NOBODY]

    def free_b(self) -> list[int]:
        return [j for j, i in enumerate(self.to_a) if i == NOBODY]

    def by_name(self, key: Key) -> None:
        """Pairs nodes of one name whose keys are equal."""
        for j in self.free_b():
            i = self.place_a.get(self.b[j].name, NOBODY)
            if i != NOBODY and self.to_b[i] == NOBODY and key(self.a[i]) == key(self.b[j]):
                self.pair(i, j)

    def by_order(self, key: Key) -> None:
        """Pairs free nodes with equal keys that stand in one order, then those whose key is unique, wherever."""
        free_a, free_b = self.free_a(), self.free_b()
        keys_a, keys_b = [key(self.a[i]) for i in free_a], [key(self.b[j]) for j in free_b]
        for k, m in common(keys_a, keys_b):
            self.pair(free_a[k], free_b[m])
        rest_a, rest_b = _unique(self.a, self.free_a(), key), _unique(self.b, self.free_b(), key)
        for found, j in rest_b.items():
            i = rest_a.get(found, NOBODY)
            if i != NOBODY and j != NOBODY:
                self.pair(i, j)

    def by_operands(self, key: Key, out: bool = True) -> None:
        """Pairs free nodes with equal keys whose operands are pairs already, in the order of the graph.

        With `out` False, where they write to does not count.
        """
        waiting: dict[Hashable, dict[str, int]] = {}
        for i in self.free_a():
            read = self.operands_a[i] if out else tuple(self.place_a[name] for name in _read(self.a[i]))
            if read:
                waiting.setdefault((key(self.a[i]), read), {})[self.a[i].name] = i
        if not waiting:
            return
        for j in self.free_b():
            taken = self.operands_b[j] if out else [self.place_b[name] for name in _read(self.b[j])]
            operands = tuple(self.to_a[operand] for operand in taken)
            if not operands or NOBODY in operands:
                continue
            same = waiting.get((key(self.b[j]), operands))
            if same:
                name = self.b[j].name
                self.pair(same.pop(name if name in same else next(iter(same))), j)

    def cost(self) -> float:
        """How much differs, in nodes."""
        changed = renamed = 0
        for j, i in enumerate(self.to_a):
            if i == NOBODY:
                changed += 1
                continue
            one, other = self.a[i], self.b[j]
            operands = tuple(self.to_a[operand] for operand in self.operands_b[j])
            changed += _computes(one) != _computes(other) or operands != self.operands_a[i]
            renamed += one.name != other.name
        return changed + self.to_b.count(NOBODY) + renamed / _RENAMED_PER_CHANGE


def align(a: Nodes, b: Nodes) -> Alignment:
    """The alignment with fewer differences. Deterministic; O(n log n) unless much has changed."""
    named = _by_names(a, b)
    if named.cost() == 0:
        return named
    structural = _by_structure(a, b)
    return structural if structural.cost() < named.cost() else named


def _by_names(a: Nodes, b: Nodes) -> Alignment:
    found = Alignment(a, b)
    found.by_name(_line)
    found.by_operands(_computes)
    for key in (_in_place_of_module, _of_module):
        found.by_order(key)
        found.by_operands(_computes)
    found.by_name(_op)
    _finish(found)
    return found


def _by_structure(a: Nodes, b: Nodes) -> Alignment:
    found = Alignment(a, b)
    found.by_order(_structure)
    found.by_operands(_computes)
    found.by_order(_value)
    found.by_operands(_computes)
    _finish(found)
    return found


def _finish(found: Alignment) -> None:
    for key in (_structure, _value, _module_op):
        found.by_order(key)
        found.by_operands(_computes)
    found.by_operands(_base, out=False)
    found.by_name(_is_input)


def _read(node: NodeRecord) -> tuple[str, ...]:
    return tuple(name for each in node.arguments if not each.is_out for name in each.operands)


def _line(node: NodeRecord) -> Hashable:
    return (*_computes(node), node.operands)


def _computes(node: NodeRecord) -> tuple[Hashable, ...]:
    return (node.phase, node.op, node.value, node.pattern)


def _base(node: NodeRecord) -> Hashable:
    return (node.phase, node.base_op, tuple(each.pattern for each in node.arguments if not each.is_out))


def _in_place_of_module(node: NodeRecord) -> Hashable:
    return (node.module, node.leaf, *_computes(node))


def _of_module(node: NodeRecord) -> Hashable:
    return (node.module, node.leaf, node.phase, node.op, node.value)


def _module_op(node: NodeRecord) -> Hashable:
    return (node.module, node.leaf, node.phase, node.op)


def _structure(node: NodeRecord) -> Hashable:
    return (node.leaf, *_computes(node))


def _value(node: NodeRecord) -> Hashable:
    return (node.leaf, node.phase, node.op, node.value)


def _op(node: NodeRecord) -> Hashable:
    return (node.phase, node.op)


def _is_input(node: NodeRecord) -> Hashable:
    return node.phase == "input"


def _unique(nodes: Nodes, free: list[int], key: Key) -> dict[Hashable, int]:
    found: dict[Hashable, int] = {}
    for i in free:
        value = key(nodes[i])
        found[value] = NOBODY if value in found else i
    return found
