"""What a comparison of two graphs has found."""

from __future__ import annotations

from dataclasses import dataclass

IDENTICAL = "identical"
RENAMED = "renamed"
REORDERED = "reordered"
COMMUNICATION = "communication changed"
COMPUTE = "compute changed"

KINDS = (IDENTICAL, RENAMED, REORDERED, COMMUNICATION, COMPUTE)
"""Classes of a difference, from the weakest to the strongest."""


@dataclass(frozen=True)
class NodeChange:
    """A node that one graph has alone, or that both have with differences.

    `before`, `after`: its name in each graph, "" where it is missing. `kind`: one of KINDS. `details`: what differs,
    one line each, such as `operand %a -> %b`.
    """

    before: str
    after: str
    op: str
    kind: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeaderChange:
    """A line of the header. None: the other graph alone has it."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class CollectiveChange:
    """A collective whose members, size or options differ. Names and members are empty where it is missing."""

    before: str
    after: str
    old_members: tuple[str, ...]
    new_members: tuple[str, ...]
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Delta:
    """A figure of both graphs. `name` is `collectives`, `bytes.<kind>`, `bytes.<kind>.<phase>`, `collectives.<phase>`,
    `step_seconds` or `exposed_seconds`."""

    name: str
    before: float
    after: float


@dataclass(frozen=True)
class Differences:
    """Two graphs, node by node. All that is listed is in graph order.

    Attributes:
        before, after: what was compared, for people.
        nodes: number of nodes of each graph.
        header: lines of the header that differ.
        added, removed: nodes that one graph has alone.
        changed: nodes that both have, and that work differently or on other operands.
        renamed: nodes that only have another name. renumbered: the same, but only the ordinal differs.
        moved: the fewest nodes that stand elsewhere.
        collectives: buckets and other collectives that differ.
        deltas: figures of both graphs; times in seconds where both can be simulated.
    """

    before: str
    after: str
    nodes: tuple[int, int]
    header: tuple[HeaderChange, ...]
    added: tuple[NodeChange, ...]
    removed: tuple[NodeChange, ...]
    changed: tuple[NodeChange, ...]
    renamed: tuple[NodeChange, ...]
    renumbered: tuple[NodeChange, ...]
    moved: tuple[NodeChange, ...]
    collectives: tuple[CollectiveChange, ...]
    deltas: tuple[Delta, ...]

    @property
    def is_same(self) -> bool:
        """Nothing differs, the header included."""
        return self.kind == IDENTICAL and not self.header

    @property
    def kind(self) -> str:
        """The strongest class of all nodes: one of KINDS. The header has no say."""
        changes = (*self.added, *self.removed, *self.changed, *self.renamed, *self.renumbered, *self.moved)
        return max((each.kind for each in changes), key=KINDS.index, default=IDENTICAL)
