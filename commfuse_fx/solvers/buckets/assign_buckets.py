"""Which collectives are fused with which: a pure decision over names, sizes, keys and dependences.

Why: docs/decisions.md, "`size` counts MiB of what travels, `index` counts parameters".
Why: docs/decisions.md, "A merge that would close a cycle is split, not refused".
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """One unfused collective."""

    name: str
    """Parameter name, or node name for a collective that serves no parameter."""
    key: Hashable
    """What fused members must agree on: kind, group, reduce op, dtype, device, phase."""
    nbytes: int
    """Payload of the full, unsharded buffer in bytes."""
    fusion_id: int | None
    """None: the policy decides; 0: never fused; n > 0: fused with all others of id n and the same key."""
    sequence: int
    """Sequence number, which `Policy.cuts` refers to. Numbers may have gaps."""


@dataclass(frozen=True)
class Policy:
    """How members without an explicit id are grouped. With neither limit given, they stand alone."""

    enabled: bool
    """False leaves every member alone, explicit ids included."""
    threshold: int | None
    """Largest bucket in bytes."""
    cuts: tuple[int, ...] | None
    """Ascending sequence numbers, each of which begins a new bucket. Takes precedence over `threshold`."""
    group: int | None = None
    """Members of one number and key are grouped. Takes precedence over `cuts`."""


@dataclass(frozen=True)
class Conflict:
    """Why a wanted bucket was split: `second` depends on `first`."""

    first: str
    second: str
    path: tuple[str, ...]
    """Names from `first` to `second`, both included. Neighbours depend on each other or are already fused."""


@dataclass(frozen=True)
class Bucketing:
    """A partition of the members, and what had to be given up to keep it legal."""

    buckets: tuple[tuple[int, ...], ...]
    """Indices into the members, ascending in a bucket; buckets are ordered by their last index."""
    conflicts: tuple[Conflict, ...]
    """One for each boundary at which a wanted bucket was split."""
    ignored_cuts: tuple[int, ...]
    """Cuts at or past the number of members they apply to, and of sequence numbers."""


def assign_buckets(
    members: Sequence[Member],
    direct: Sequence[Sequence[int]],
    policy_of: Callable[[Member], Policy],
    numbered: int = 0,
) -> Bucketing:
    """Partition `members` into buckets that can be fused without closing a dependence cycle.

    Args:
        members: collectives in the order in which their inputs become ready.
        direct: for each member, the smaller indices that it depends on. Any set that generates the whole
            dependence relation will do.
        policy_of: the policy that governs a member.
        numbered: how many sequence numbers there are, where that is more than the members of a policy.

    Raises:
        ValueError: `direct` does not match `members`, or names a member that is not an earlier one.
    """
    if len(direct) != len(members):
        raise ValueError(f"direct has {len(direct)} entries for {len(members)} members")
    for index, needs in enumerate(direct):
        if any(not 0 <= need < index for need in needs):
            raise ValueError(f"direct[{index}] = {list(needs)} must hold indices from 0 to {index - 1} only")

    policies = [policy_of(member) for member in members]
    governed = Counter(policy.cuts for policy in policies if policy.enabled and policy.cuts is not None)
    governed |= Counter(dict.fromkeys(governed, numbered))
    ignored = {cut: None for cuts, count in governed.items() for cut in cuts if cut >= count}
    wanted = _wanted_buckets(members, policies, governed)
    groups, conflicts = _legal_groups(members, direct, wanted)
    return Bucketing(
        buckets=tuple(sorted((tuple(group) for group in groups), key=lambda group: group[-1])),
        conflicts=tuple(conflicts),
        ignored_cuts=tuple(sorted(ignored)),
    )


def _wanted_buckets(
    members: Sequence[Member], policies: Sequence[Policy], governed: Counter[tuple[int, ...]]
) -> list[list[int]]:
    """The buckets that ids and policies ask for, ordered by first member; dependences are not looked at."""
    buckets: list[list[int]] = []
    current: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    for index, (member, policy) in enumerate(zip(members, policies, strict=True)):
        slot: Hashable
        limit = None
        if not policy.enabled or member.fusion_id == 0:
            slot = index
        elif member.fusion_id is not None:
            slot = ("id", member.key, member.fusion_id)
        elif policy.group is not None:
            slot = ("group", member.key, policy.group)
        elif policy.cuts is not None:
            in_force = bisect_left(policy.cuts, governed[policy.cuts])
            segment = bisect_right(policy.cuts, member.sequence, hi=in_force)
            slot = ("cut", member.key, policy.cuts, segment)
        elif policy.threshold is not None:
            slot = ("size", member.key, policy.threshold)
            limit = policy.threshold
        else:
            slot = index

        total = filled.get(slot, 0) + member.nbytes
        if slot not in current or (limit is not None and total > limit):
            current[slot] = []
            buckets.append(current[slot])
            total = member.nbytes
        current[slot].append(index)
        filled[slot] = total
    return buckets


def _legal_groups(
    members: Sequence[Member], direct: Sequence[Sequence[int]], wanted: list[list[int]]
) -> tuple[list[list[int]], list[Conflict]]:
    """Split each wanted bucket, in order, into the fewest groups that keep the contracted graph acyclic.

    A path between two members of a bucket, through groups that are parts of wanted buckets, is a closed walk
    once every wanted bucket is contracted. So only the cyclic components of that graph need a closer look,
    and each of them can be settled by itself.
    """
    owner = {member: number for number, bucket in enumerate(wanted) for member in bucket}
    graph = [[owner[need] for member in bucket for need in direct[member]] for bucket in wanted]
    groups = [[bucket] for bucket in wanted]
    conflicts: list[list[Conflict]] = [[] for _ in wanted]
    for component in _cyclic_components(graph):
        contraction = _Contraction([member for number in component for member in wanted[number]], direct)
        for number in component:
            groups[number], paths = contraction.fuse(wanted[number])
            for path in paths:
                names = tuple(members[index].name for index in path)
                conflicts[number].append(Conflict(names[0], names[-1], names))
    return [group for split in groups for group in split], [item for found in conflicts for item in found]


class _Contraction:
    """A dependence graph whose nodes are fused bucket after bucket, held in topological order.

    Fused nodes stand side by side in that order. Whatever lies on a path between two nodes stands between
    them, so a bucket is settled by one walk over its own stretch of the order (after Pearce and Kelly, 2006).
    """

    def __init__(self, nodes: Sequence[int], direct: Sequence[Sequence[int]]) -> None:
        self.order = sorted(nodes)
        self.place = {node: place for place, node in enumerate(self.order)}
        self.needs = {node: sorted(need for need in direct[node] if need in self.place) for node in nodes}
        self.group = {node: [node] for node in nodes}

    def fuse(self, bucket: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
        """Fuse unfused nodes in the fewest legal groups; also give a path that asks for each boundary.

        The groups are the levels of Mirsky (1971): nodes by the length of the longest chain of the bucket
        that ends in them. A chain needs as many groups as it has nodes, so no split is smaller. Depth never
        falls along a path, so the stretch stably sorted by it is a topological order with all levels fused.
        """
        start = min(self.place[node] for node in bucket)
        stop = max(self.place[node] for node in bucket) + 1
        inside = dict.fromkeys(bucket)
        # How many nodes of the bucket stand on the longest chain that ends in a node, where there are any.
        depth: dict[int, int] = {}
        levels: list[list[int]] = []
        between: list[list[int]] = [[]]
        for node in self.order[start:stop]:
            group = self.group[node]
            if group[0] != node:
                continue
            above = max((depth.get(need, 0) for peer in group for need in self.needs[peer]), default=0)
            if node in inside:
                if above == len(levels):
                    levels.append([])
                    between.append([])
                levels[above].append(node)
                depth[node] = above + 1
            else:
                between[above] += group
                if above:
                    depth.update(dict.fromkeys(group, above))

        levels = [sorted(level) for level in levels]
        paths = [self._path(level[0], number, depth, inside) for number, level in enumerate(levels) if number]
        stretch = between[0]
        for level, rest in zip(levels, between[1:], strict=True):
            stretch += level + rest
            for node in level:
                self.group[node] = level
        self.order[start:stop] = stretch
        for place, node in enumerate(stretch, start):
            self.place[node] = place
        return levels, paths

    def _path(self, target: int, above: int, depth: Mapping[int, int], inside: Container[int]) -> list[int]:
        """A shortest path to `target` from a node of the bucket at depth `above`, one less than its own."""
        # What follows a node: the user that needs it and, if another, the peer from which the path goes on.
        onward: dict[int, list[int]] = {}
        seen: set[int] = set()
        frontier = deque([target])
        while True:
            node = frontier.popleft()
            for peer in self.group[node]:
                for need in self.needs[peer]:
                    first = self.group[need][0]
                    if depth.get(need) != above or first in seen:
                        continue
                    seen.add(first)
                    onward[need] = [peer] if peer == node else [peer, node]
                    if need not in inside:
                        frontier.append(need)
                        continue
                    path = [need]
                    while path[-1] != target:
                        path += onward[path[-1]]
                    return path


def _cyclic_components(graph: Sequence[Sequence[int]]) -> list[list[int]]:
    """Strongly connected components that hold a cycle, each ascending (Tarjan 1972, explicit stack)."""
    closed = len(graph) + 1
    number = [0] * len(graph)
    lowest = [0] * len(graph)
    clock = 0
    pending: list[int] = []
    components: list[list[int]] = []
    for root in range(len(graph)):
        walk = [] if number[root] else [(root, iter(graph[root]))]
        while walk:
            node, targets = walk[-1]
            if not number[node]:
                clock += 1
                number[node] = lowest[node] = clock
                pending.append(node)
            for target in targets:
                if not number[target]:
                    walk.append((target, iter(graph[target])))
                    break
                lowest[node] = min(lowest[node], lowest[target])
            else:
                walk.pop()
                if walk:
                    parent = walk[-1][0]
                    lowest[parent] = min(lowest[parent], lowest[node])
                if lowest[node] == number[node]:
                    component = [pending.pop()]
                    while component[-1] != node:
                        component.append(pending.pop())
                    for done in component:
                        lowest[done] = closed
                    if len(component) > 1 or node in graph[node]:
                        components.append(sorted(component))
    return components
