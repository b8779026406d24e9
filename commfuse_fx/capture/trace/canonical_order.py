"""A canonical order of the nodes of a traced graph, which does not depend on the order of loop iterations.

A loop may iterate over a set, whose order differs between processes. So iterations that need nothing of each other are
sorted: first by their place in the loop's body, then by what they compute, with numbers in names compared as numbers
("layer.2" before "layer.10"). In most programs this is the order in which they ran. An iteration that depends on
another one (the next layer, a sum, the next random number) stays behind it. The backward is then put in the order in
which autograd would have run it after that forward.

Why: docs/decisions.md, "The order of a set decides nothing".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from commfuse_fx.capture.trace.backward_order import BackwardOrder
from commfuse_fx.capture.trace.call_paths import CallPaths, Path, loop_inside, neighbours
from commfuse_fx.capture.trace.gradient_sums import added_by_autograd, gather, spread
from commfuse_fx.capture.trace.node_keys import NodeKeys
from commfuse_fx.ir.core.dependence import Dependence
from commfuse_fx.ir.core.order import stable_sort

_Loop = tuple[int, int] | None


def order_canonically(graph: fx.Graph, calls: CallPaths, event_of: Mapping[fx.Node, int], keys: NodeKeys) -> None:
    """Put the nodes of a functional graph in canonical order.

    event_of: for each op the number of the event that it comes from. Nodes without an event stay at both ends.
    """
    made = _made(graph, event_of)
    forward = [number for number in made if calls.events[number].path]
    needs = _needs_of_events(made, Dependence(graph).direct, event_of)
    order = _Forward(calls, made, needs, keys).arranged(forward)
    if order == forward:
        _sort(graph, made, list(made))
        return
    added = added_by_autograd(calls, made, event_of)
    sums = gather(list(added.values()))
    made = _made(graph, event_of)
    needs = _needs_of_events(made, Dependence(graph).direct, event_of)
    backward = [number for number in made if not calls.events[number].path]
    runs = neighbours(backward, lambda number: (calls.events[number].run, number if number in added else -1))
    run_of = {node: i for i, (_, part) in enumerate(runs) for number in part for node in made[number]}
    order += BackwardOrder(calls, needs, order, added).arranged([part for _, part in runs])
    _sort(graph, made, order)
    spread(sums, run_of)


def _made(graph: fx.Graph, event_of: Mapping[fx.Node, int]) -> dict[int, list[fx.Node]]:
    """The nodes that each event has become, in the order of the events."""
    found: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node in event_of and node.op == "call_function":
            found.setdefault(event_of[node], []).append(node)
    return dict(sorted(found.items()))


def _sort(graph: fx.Graph, made: Mapping[int, Sequence[fx.Node]], order: Sequence[int]) -> None:
    place = {node: i for i, node in enumerate(node for number in order for node in made[number])}
    nodes = list(graph.nodes)
    position: dict[fx.Node, float] = {}
    begun = False
    for i, node in enumerate(nodes):
        begun = begun or node in place
        if not begun and node.op != "get_attr":  # inputs, and what is made of them before the model is called
            position[node] = -1
        elif node.op == "get_attr":  # stands before its first user
            position[node] = min((place.get(user, len(nodes)) for user in node.users), default=len(nodes)) - 0.5
        else:
            position[node] = place.get(node, len(nodes) + i)
    stable_sort(graph, position, Dependence(graph).direct)


def _needs_of_events(
    made: Mapping[int, Sequence[fx.Node]],
    before: Mapping[fx.Node, Iterable[fx.Node]],
    event_of: Mapping[fx.Node, int],
) -> dict[int, list[int]]:
    """The earlier events that each one needs."""
    return {
        number: list(
            dict.fromkeys(
                event_of[other]
                for node in nodes
                for other in before[node]
                if other.op == "call_function" and event_of.get(other, number) < number
            )
        )
        for number, nodes in made.items()
    }


class _Forward:
    """Orders the events of the forward pass, loop by loop."""

    def __init__(
        self,
        calls: CallPaths,
        made: Mapping[int, Sequence[fx.Node]],
        needs: Mapping[int, Sequence[int]],
        keys: NodeKeys,
    ) -> None:
        self.paths: dict[int, Path] = {number: calls.events[number].path for number in made}
        self.made = made
        self.needs = needs
        self.keys = keys
        self._known: dict[tuple[int, _Loop, int], _Loop] = {}  # the paths keep the codes

    def arranged(self, events: list[int]) -> list[int]:
        return self._body(events, 0, None) if events else []

    def _body(self, events: list[int], depth: int, loop: _Loop) -> list[int]:
        """The events of one activation, at `depth` of their paths, within a loop of its code."""
        callee = self._callee(events[0], depth)
        while callee is not None and callee == self._callee(events[-1], depth):  # all of this was one call
            depth, loop = depth + 1, None
            callee = self._callee(events[0], depth)
        order: list[int] = []
        for inner, part in neighbours(events, lambda number: self._inner(number, depth, loop)):
            if inner is not None:
                iterations = [self._body(each, depth, inner) for each in self._iterations(part, depth, inner)]
                order += self._sorted(self._parts(iterations), depth)
                continue
            for _, calls in neighbours(part, lambda number: self.paths[number][depth].at):
                # One instruction can run several functions, as that which calls map() does.
                callees = neighbours(calls, lambda number: self._callee(number, depth))
                order += self._sorted([self._deeper(each, depth) for _, each in callees], depth)
        return order

    def _deeper(self, events: list[int], depth: int) -> list[int]:
        return events if self._callee(events[0], depth) is None else self._body(events, depth + 1, None)

    def _callee(self, number: int, depth: int) -> int | None:
        path = self.paths[number]
        return path[depth + 1].activation if depth + 1 < len(path) else None

    def _inner(self, number: int, depth: int, loop: _Loop) -> _Loop:
        call = self.paths[number][depth]
        key = (id(call.code), loop, call.at)
        if key not in self._known:
            self._known[key] = loop_inside(call.code, loop, call.at)
        return self._known[key]

    def _iterations(self, events: list[int], depth: int, loop: _Loop) -> list[list[int]]:
        """Cut the events of a loop into iterations: at jumps back, and at repeated calls of one instruction."""
        found: list[list[int]] = []
        last: tuple[int, int | None] | None = None
        for number in events:
            inner = self._inner(number, depth, loop)
            at = self.paths[number][depth].at if inner is None else inner[0]
            now = (at, self._callee(number, depth) if inner is None else None)
            if last is None or at < last[0] or (at == last[0] and now[1] != last[1]):
                found.append([])
            found[-1].append(number)
            last = now
        return found

    def _sorted(self, parts: list[list[int]], depth: int) -> list[int]:
        """Sort independent iterations by their keys; an iteration that needs another one comes after it."""
        if len(parts) == 1:
            return parts[0]
        owner = {number: i for i, part in enumerate(parts) for number in part}
        level: list[int] = []
        for i, part in enumerate(parts):
            needed = dict.fromkeys(owner[other] for number in part for other in self.needs[number] if other in owner)
            needed.pop(i, None)
            level.append(max((level[other] + 1 for other in needed), default=0))
        by_level: dict[int, list[int]] = {}
        for i in range(len(parts)):
            by_level.setdefault(level[i], []).append(i)
        order: list[int] = []
        for _, same in sorted(by_level.items()):
            if len(same) > 1:
                same = sorted(same, key=lambda i: self._key(parts[i], depth))
            order += [number for i in same for number in parts[i]]
        return order

    def _parts(self, iterations: list[list[int]]) -> list[list[int]]:
        """The iterations, with those cut further that may be several.

        If an iteration takes a later branch of the loop's body than the one before, both look like one iteration. So an
        iteration without links to others is cut into parts without links to each other.
        """
        owner = {number: i for i, iteration in enumerate(iterations) for number in iteration}
        linked: dict[int, None] = {}
        for number, i in owner.items():
            for other in self.needs[number]:
                if owner.get(other, i) != i:
                    linked.update({i: None, owner[other]: None})
        return [
            part
            for i, iteration in enumerate(iterations)
            for part in ([iteration] if i in linked else self._connected(iteration))
        ]

    def _connected(self, iteration: list[int]) -> list[list[int]]:
        """The parts of an iteration that need nothing of each other. It stays whole if their ops ran by turns."""
        inside = dict.fromkeys(iteration)
        root = {number: number for number in iteration}

        def find(number: int) -> int:
            while root[number] != number:
                root[number] = root[root[number]]
                number = root[number]
            return number

        for number in iteration:
            for other in self.needs[number]:
                if other in inside:
                    root[find(number)] = find(other)
        parts = neighbours(iteration, find)
        is_mixed = len(parts) > len(dict.fromkeys(kind for kind, _ in parts))
        return [iteration] if is_mixed else [part for _, part in parts]

    def _key(self, part: Sequence[int], depth: int) -> tuple[Any, ...]:
        """The sort key: the place in the loop, what the part computes, and what later ops compute from it."""
        nodes = [node for number in part for node in self.made[number]]
        return (
            self.paths[part[0]][depth].at,
            [self.keys.natural(node) for node in nodes],
            [self.keys.digest(node) for node in nodes],
            [self.keys.uses(node) for node in nodes],
        )
