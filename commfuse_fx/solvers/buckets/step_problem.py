"""Which collectives of a graph to merge so that the predicted step is shortest: graphs as numbers.

The searches (`solvers.cuts`, `solvers.consumers`, `solvers.cyclic`) are exact about what they know: readiness, sizes
and lines. They leave out what the engine knows, such as the core that a backend shares with the step. So several cuts
are played on the engine, and the one that ends first is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from torch import fx

from commfuse_fx.cost.collective_cost import CollectiveCost
from commfuse_fx.cost.model import CostModel
from commfuse_fx.cost.numbers import EQUAL, in_ms
from commfuse_fx.cost.transfer import Transfer
from commfuse_fx.ir.core.builder import aten
from commfuse_fx.ir.core.collectives import collective_of, is_start, is_wait, wait_of
from commfuse_fx.ir.core.dependence import is_view
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.naming import parameter_of
from commfuse_fx.ir.core.program import Program
from commfuse_fx.solvers.buckets.compute_program import Item
from commfuse_fx.solvers.buckets.consumers import optimal_plan
from commfuse_fx.solvers.buckets.cut_moves import Ranges, cut_by_size, ranges_of
from commfuse_fx.solvers.buckets.cuts import optimal_cuts
from commfuse_fx.solvers.buckets.cyclic import CyclicMember
from commfuse_fx.solvers.buckets.cyclic_buckets import affords_all_sizes, cyclic_buckets
from commfuse_fx.solvers.buckets.loop import Loop
from commfuse_fx.solvers.buckets.played_cuts import Message, PlayedCuts

THRESHOLDS = tuple(mebibytes * 2**20 for mebibytes in (1, 2, 4, 8, 16, 25, 32, 64))
"""Bytes at which neighbours are cut for comparison with the optimal cuts."""

_Groups = tuple[list[list[fx.Node]], str]
"""Collectives to be merged, and what `explain()` says of them."""


@dataclass(frozen=True)
class Grouping:
    """A grouping says which collectives are to be merged: those of one number.

    reasons: (subject, reason) lines for `explain()`.
    """

    number: Mapping[fx.Node, int]
    reasons: tuple[tuple[str, str], ...]


def group_collectives(
    program: Program,
    by_key: Mapping[Hashable, Sequence[fx.Node]],
    costs: CostModel,
    across_steps: bool,
    given: Sequence[Sequence[fx.Node]] = (),
) -> Grouping:
    """The cut of each key's collectives (starts, in graph order) that minimises the predicted step time.

    Collectives that are waited for at the end of the step are cut optimally under the prices of all algorithms
    (`optimal_cuts`), compared with cuts by size, and adjusted where the engine sees that as faster; those whose
    consumers stand in between are cut by `optimal_plan`; with `across_steps`, gradients by `Loop`. Then keys that are
    waited for at the end are cut once more, beside the buckets of the others and those that are `given`.
    """
    graph = _Graph(program, costs)
    keys = [list(starts) for starts in by_key.values() if len(starts) > 1]
    found = [graph.groups(starts, across_steps) for starts in keys]
    alone = [list(starts) for starts in by_key.values() if len(starts) == 1]
    if not across_steps and len(keys) + len(alone) + len(given) > 1:
        found = graph.together(keys, found, [*alone, *given])
    number: dict[fx.Node, int] = {}
    reasons: list[tuple[str, str]] = []
    for starts, (groups, reason) in zip(keys, found, strict=True):
        first = len(dict.fromkeys(number.values()))
        for i, group in enumerate(groups):
            number.update(dict.fromkeys(group, first + i))
        kind = collective_of(starts[0]).kind
        reasons.append((f"{len(starts)} {kind} -> {len(groups)}", reason))
    return Grouping(number, tuple(reasons))


def line(costs: CostModel, start: fx.Node, program: Program, nbytes: int) -> tuple[float, float]:
    """(alpha, beta) of messages of about this size: seconds, seconds per byte."""
    cost: CollectiveCost = costs.cost_of(start, nbytes, mesh=program.mesh)
    return cost.latency, cost.transfer / nbytes


def busy_beta(cost: CollectiveCost, nbytes: int) -> float:
    """Seconds per byte beside compute that never rests: as in the engine, the backend gets half of the core at most."""
    return max(cost.transfer / cost.busy_speed, 2 * cost.host) / nbytes


class _Graph:
    """Times and places in the graph before fusion."""

    def __init__(self, program: Program, costs: CostModel) -> None:
        self.program = program
        self.costs = costs
        self.nodes = list(program.graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        # Starts are what is to be merged, and what is cast is what they yield: both cost as much as buckets are left.
        self.seconds = [
            0.0 if is_start(node) or _casts_back(node) else costs.compute_seconds(node) for node in self.nodes
        ]
        self.clock = list(accumulate(self.seconds, initial=0.0))

    def groups(self, starts: list[fx.Node], across_steps: bool) -> _Groups:
        sizes = [collective_of(start).nbytes for start in starts]
        if not self._at_end(starts):
            alpha, beta = line(self.costs, starts[0], self.program, max(sum(sizes) // 8, 1))
            return self._between(starts, [self._first_use(wait_of(start)) for start in starts], sizes, alpha, beta)
        if across_steps and self.program.updates:
            found = self._across(starts, sizes)
            if found is not None:
                return found
        played = self._played(starts, sizes)
        return self._cut(played, starts, played.best(self._cuts(starts, sizes)))

    def together(
        self, keys: Sequence[list[fx.Node]], found: Sequence[_Groups], given: Sequence[Sequence[fx.Node]]
    ) -> list[_Groups]:
        """The groups of each key, cut beside those of all the others and the given ones."""
        groups = list(found)
        late = [k for k, starts in enumerate(keys) if self._at_end(starts)]
        sizes = [[collective_of(start).nbytes for start in starts] for starts in keys]

        def beside(k: int) -> PlayedCuts:
            others = [bucket for i, (buckets, _) in enumerate(groups) if i != k for bucket in buckets]
            return self._played(keys[k], sizes[k], traffic=[self._message(each) for each in (*others, *given)])

        def seconds() -> float:
            played = beside(late[0])
            return played.seconds(ranges_of(groups[late[0]][0]))

        if len(late) > 1:
            best = seconds()
            for threshold in THRESHOLDS:
                kept = list(groups)
                for k in late:
                    cuts = cut_by_size(sizes[k], threshold)
                    groups[k] = ([keys[k][begin:end] for begin, end in cuts], "")
                if (now := seconds()) < best * (1 - EQUAL):
                    best = now
                else:
                    groups = kept
        once = len(late) == 1 or not affords_all_sizes(sum(map(len, keys)))
        for k in late if once else late * 2:
            played = beside(k)
            cuts = played.best([ranges_of(groups[k][0]), *self._cuts(keys[k], sizes[k])])
            groups[k] = self._cut(played, keys[k], cuts)
        return groups

    def _cut(self, played: PlayedCuts, starts: Sequence[fx.Node], cuts: Ranges) -> _Groups:
        late = played.play(cuts).arrival - self.clock[self.place[starts[-1]]]
        text = f"the last one arrives {in_ms(late)} after the last gradient, by the cost model"
        return [list(starts[begin:end]) for begin, end in cuts], text

    def _message(self, bucket: Sequence[fx.Node]) -> Message:
        nbytes = sum(collective_of(start).nbytes for start in bucket)
        transfer = self.costs.transfer_of(bucket[0], nbytes, mesh=self.program.mesh)
        return Message(self.clock[max(map(self.place.__getitem__, bucket))], transfer)

    def _at_end(self, starts: Sequence[fx.Node]) -> bool:
        """Whether all of these are waited for at the end of the step."""
        last_ready = self.place[starts[-1]]
        needs = (self._first_use(wait_of(start)) for start in starts)
        return all(need >= last_ready and self._is_late(need) for need in needs)

    def _played(
        self, starts: Sequence[fx.Node], sizes: Sequence[int], each: float = 0.0, traffic: Sequence[Message] = ()
    ) -> PlayedCuts:
        device = self.costs.cluster.device
        # Without an update gradients are handed out: in memory allocated anew, divided bucket by bucket.
        handed_out = not self.program.updates
        divided = handed_out and collective_of(starts[0]).reduce_op == "avg"
        return PlayedCuts(
            [self.clock[self.place[start]] for start in starts],
            sizes,
            self.compute_behind(starts[-1]),
            self.price(starts[0]),
            device,
            allocation=device.op_overhead if handed_out else 0.0,
            passes=divided + any(map(_casts_back, wait_of(starts[0]).users)),
            each=each,
            traffic=sorted(traffic, key=lambda message: message.ready),
        )

    def _cuts(self, starts: Sequence[fx.Node], sizes: Sequence[int]) -> Iterator[Ranges]:
        """The cuts that are optimal for all prices together, for the price of one size, and cuts by size."""
        ready = [self.clock[self.place[start]] for start in starts]
        total = sum(sizes)
        ladder = sorted({*THRESHOLDS, *sizes, total, max(total // 8, 1)})
        lines = list(dict.fromkeys(line(self.costs, starts[0], self.program, size) for size in ladder if size))
        yield optimal_cuts(ready, sizes, *lines[0], also=lines[1:]).buckets
        alpha, beta = line(self.costs, starts[0], self.program, max(total // 8, 1))
        yield optimal_cuts(ready, sizes, alpha, beta).buckets
        for threshold in THRESHOLDS:
            yield cut_by_size(sizes, threshold)
        yield ((0, len(sizes)),)
        yield tuple((i, i + 1) for i in range(len(sizes)))

    def compute_behind(self, last: fx.Node) -> float:
        """Seconds of compute from this collective on that does not wait for it."""
        place = self.place[last]
        behind = zip(self.nodes[place:], self.seconds[place:], strict=True)
        return sum(seconds for node, seconds in behind if info(node).phase != "update")

    def _is_late(self, place: int) -> bool:
        node = self.nodes[place]
        return node.op == "output" or info(node).phase == "update"

    def _first_use(self, node: fx.Node) -> int:
        """Place of the first node that works on this value: views do not, nor casts of what a collective yields, which
        stand where their result is used."""
        found = len(self.nodes) - 1
        pending = [node]
        while pending:
            for user in pending.pop().users:
                if is_view(user) or is_wait(user) or _casts_back(user):
                    pending.append(user)
                else:
                    found = min(found, self.place[user])
        return found

    def _between(self, starts: list[fx.Node], needs: list[int], sizes: list[int], alpha: float, beta: float) -> _Groups:
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
        return [[starts[i] for i in bucket] for bucket in plan.buckets], "fewest and earliest for their consumers"

    def _across(self, starts: list[fx.Node], sizes: list[int]) -> _Groups | None:
        """Gradients that the next step waits for: send order and buckets by the need of its forward.

        Each further bucket is one more update. Where a step that waits for all at its end is no slower, its cuts.
        """
        loop = self._loop(starts, sizes)
        if loop is None:
            return None
        members, forward, backward = loop
        nbytes = max(sum(sizes) // 16, 1)
        cost = self.costs.cost_of(starts[0], nbytes, mesh=self.program.mesh)
        each = self._update_overhead()
        message = self.costs.cluster.device.collective_overhead
        judge = Loop(forward, backward, self.price(starts[0]), message, each)
        across, period = cyclic_buckets(judge, members, cost.latency, busy_beta(cost, nbytes), cost.host / nbytes)
        played = self._played(starts, sizes, each)
        cuts = played.best(self._cuts(starts, sizes))
        in_step = played.seconds(cuts) + self.clock[-1] - self.clock[self.place[starts[-1]]] - played.rest
        if in_step <= period * (1 + EQUAL):
            reason = f"a step takes {in_ms(in_step)} with all communication waited for at its end, by the cost model"
            return [starts[begin:end] for begin, end in cuts], reason
        reason = f"a step takes {in_ms(period)} with communication across steps, by the cost model"
        return [[starts[i] for i in group] for group in across], reason

    def _loop(
        self, starts: list[fx.Node], sizes: list[int]
    ) -> tuple[list[CyclicMember], list[float], list[float]] | None:
        """The step as a loop for `solvers.cyclic`: members, and seconds of the blocks of forward and backward."""
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
        update = sum(s for node, s in zip(self.nodes, self.seconds, strict=True) if info(node).phase == "update")
        rest = self.clock[-1] - self.clock[places[-1]] - update
        total = sum(sizes)
        members = [
            CyclicMember(size, i, block[need], update * size / total)
            for i, (size, need) in enumerate(zip(sizes, wanted, strict=True))
        ]
        return members, forward, [*backward, max(rest, 0.0)]

    def price(self, start: fx.Node) -> Callable[[int], Transfer]:
        return cache(lambda nbytes: self.costs.transfer_of(start, nbytes, mesh=self.program.mesh))

    def _update_overhead(self) -> float:
        """Seconds that an update takes at least, whatever its size."""
        ops = [n for n, s in zip(self.nodes, self.seconds, strict=True) if s and info(n).phase == "update"]
        return len(ops) * self.costs.cluster.device.op_overhead

    def _first_parameter_use(self, start: fx.Node) -> int | None:
        found: int | None = None
        for name in collective_of(start).members:
            param = self.program.placeholder("parameter", parameter_of(name))
            if param is None:
                return None
            use = self._first_use(param)
            found = use if found is None else min(found, use)
        return found


def _casts_back(node: fx.Node) -> bool:
    """Whether this casts what a collective yields: it stands where its result is used, once for each bucket."""
    return node.target is aten._to_copy.default and is_wait(node.all_input_nodes[0])
