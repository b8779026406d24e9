"""Which collectives of a graph to merge so that the predicted step is shortest: graphs as numbers for `cost.cuts`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from commfuse_fx.cost.collectives import CollectiveCost
from commfuse_fx.cost.cuts import CyclicMember, Item, choose_piece, optimal_cuts, optimal_plan
from commfuse_fx.cost.model import CostModel
from commfuse_fx.ir.collectives import is_wait, wait_of
from commfuse_fx.ir.dependence import is_view
from commfuse_fx.ir.meta import CollectiveInfo, info
from commfuse_fx.ir.program import Program

MOST_MEMBERS = 512
"""Above this many collectives of one key, neighbours are merged until so many are left, before the search begins."""


@dataclass(frozen=True)
class Grouping:
    """number: collectives of one number are to be merged. reasons: (subject, reason) lines for `explain()`."""

    number: Mapping[fx.Node, int]
    reasons: tuple[tuple[str, str], ...]


def group_collectives(
    program: Program, by_key: Mapping[Hashable, Sequence[fx.Node]], costs: CostModel, across_steps: bool
) -> Grouping:
    """The cut of each key's collectives (starts, in graph order) that minimises the predicted step time.

    Collectives that are waited for at the end of the step are cut optimally under alpha + beta * m (`optimal_cuts`);
    those whose consumers stand in between by `optimal_plan`; with `across_steps`, gradients by `choose_piece`.
    """
    graph = _Graph(program, costs)
    number: dict[fx.Node, int] = {}
    reasons: list[tuple[str, str]] = []
    for starts in by_key.values():
        if len(starts) < 2:
            continue
        groups, reason = graph.groups(list(starts), across_steps)
        first = len(dict.fromkeys(number.values()))
        for i, group in enumerate(groups):
            number.update(dict.fromkeys(group, first + i))
        kind = _details(starts[0]).kind
        reasons.append((f"{len(starts)} {kind} -> {len(groups)}", reason))
    return Grouping(number, tuple(reasons))


def line(costs: CostModel, start: fx.Node, program: Program, nbytes: int) -> tuple[float, float, float]:
    """(alpha, beta, host) of messages of about this size: seconds, seconds per byte, compute seconds per byte."""
    cost: CollectiveCost = costs.cost_of(start, nbytes, mesh=program.mesh)
    return cost.latency, cost.transfer / nbytes, cost.host / nbytes


class _Graph:
    """Times and places in the graph before fusion."""

    def __init__(self, program: Program, costs: CostModel) -> None:
        self.program = program
        self.costs = costs
        self.nodes = list(program.graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.seconds = [costs.compute_seconds(node) for node in self.nodes]
        self.clock = list(accumulate(self.seconds, initial=0.0))

    def groups(self, starts: list[fx.Node], across_steps: bool) -> tuple[list[list[fx.Node]], str]:
        needs = [self._first_use(wait_of(start)) for start in starts]
        last_ready = self.place[starts[-1]]
        at_end = all(need >= last_ready and self._is_late(need) for need in needs)
        sizes = [_details(start).nbytes for start in starts]
        alpha, beta, _ = line(self.costs, starts[0], self.program, max(sum(sizes) // 8, 1))
        if at_end and across_steps and self.program.updates:
            found = self._across(starts)
            if found is not None:
                return found
        if at_end:
            ready = [self.clock[self.place[start]] for start in starts]
            cuts = optimal_cuts(ready, sizes, alpha, beta)
            end = ready[-1]
            text = f"the last one arrives {_ms(cuts.finish - end)} after the last gradient, by the cost model"
            return [starts[begin:end] for begin, end in cuts.buckets], text
        return self._between(starts, needs, sizes, alpha, beta)

    def _is_late(self, place: int) -> bool:
        node = self.nodes[place]
        return node.op == "output" or info(node).phase == "update"

    def _first_use(self, node: fx.Node) -> int:
        """Place of the first node that works on this value: views do not."""
        found = len(self.nodes) - 1
        pending = [node]
        while pending:
            for user in pending.pop().users:
                if is_view(user) or is_wait(user):
                    pending.append(user)
                else:
                    found = min(found, self.place[user])
        return found

    def _between(
        self, starts: list[fx.Node], needs: list[int], sizes: list[int], alpha: float, beta: float
    ) -> tuple[list[list[fx.Node]], str]:
        """Results are used along the way: each bucket must be there for the first of its uses."""
        events: dict[int, list[Item]] = {}
        for i, start in enumerate(starts):
            events.setdefault(self.place[start], []).append(("ready", i))
            events.setdefault(needs[i], []).append(("need", i))
        items: list[Item] = []
        reached = 0
        for place in sorted(events):
            items.append(("run", self.clock[place] - self.clock[reached]))
            items.extend(sorted(events[place], key=lambda item: item[0], reverse=True))
            reached = place
        items.append(("run", self.clock[-1] - self.clock[reached]))
        plan = optimal_plan(items, sizes, alpha, beta)
        buckets = sorted((sorted(bucket) for bucket in plan.buckets), key=lambda bucket: bucket[-1])
        return [[starts[i] for i in bucket] for bucket in buckets], "fewest and earliest for their consumers"

    def _across(self, starts: list[fx.Node]) -> tuple[list[list[fx.Node]], str] | None:
        """Gradients that the next step waits for: send order and buckets by the need of its forward."""
        uses = [self._first_parameter_use(start) for start in starts]
        first_ready = self.place[starts[0]]
        if any(use is None for use in uses):
            return None
        wanted = [min(use, first_ready) for use in uses if use is not None]
        cuts = sorted({0, *wanted})
        forward = [self.clock[e] - self.clock[b] for b, e in zip(cuts, [*cuts[1:], first_ready], strict=True)]
        block = {cut: i for i, cut in enumerate(cuts)}
        places = [self.place[start] for start in starts]
        backward = [self.clock[e] - self.clock[b] for b, e in zip([first_ready, *places], places, strict=False)]
        last = places[-1]
        update = sum(s for node, s in zip(self.nodes, self.seconds, strict=True) if info(node).phase == "update")
        rest = self.clock[-1] - self.clock[last] - update
        sizes = [_details(start).nbytes for start in starts]
        total = sum(sizes)
        members = [
            CyclicMember(size, i, block[need], update * size / total)
            for i, (size, need) in enumerate(zip(sizes, wanted, strict=True))
        ]
        coarse = _coarse(members)
        alpha, beta, host = line(self.costs, starts[0], self.program, max(total // 16, 1))
        merged = [_joined([members[i] for i in group]) for group in coarse]
        choice = choose_piece(forward, [*backward, max(rest, 0.0)], merged, alpha, beta, host)
        groups = [[starts[i] for part in group for i in coarse[part]] for group in choice.groups]
        return groups, f"a step takes {_ms(choice.plan.period)} with communication across steps, by the cost model"

    def _first_parameter_use(self, start: fx.Node) -> int | None:
        found: int | None = None
        for name in _details(start).members:
            param = self.program.placeholder("parameter", name)
            if param is None:
                return None
            use = self._first_use(param)
            found = use if found is None else min(found, use)
        return found


def _coarse(members: Sequence[CyclicMember]) -> list[list[int]]:
    """Neighbours together, so that at most MOST_MEMBERS groups are left."""
    if len(members) <= MOST_MEMBERS:
        return [[i] for i in range(len(members))]
    limit = sum(member.nbytes for member in members) / MOST_MEMBERS * 2
    groups: list[list[int]] = [[]]
    size = 0
    for i, member in enumerate(members):
        if groups[-1] and size + member.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(i)
        size += member.nbytes
    return groups


def _joined(parts: Sequence[CyclicMember]) -> CyclicMember:
    return CyclicMember(
        sum(part.nbytes for part in parts),
        max(part.ready for part in parts),
        min(part.need for part in parts),
        sum(part.update for part in parts),
    )


def _details(start: fx.Node) -> CollectiveInfo:
    details = info(start).collective
    assert details is not None
    return details


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
