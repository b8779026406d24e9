"""Which collectives of a graph to merge so that the predicted step is shortest: graphs as numbers.

The searches (`cost.cuts`, `cost.consumers`, `cost.cyclic`) are exact about what they know: readiness, sizes, lines.
What they leave out, such as the core that a backend shares with the step, the engine knows; so several cuts are
played on it, and the one that ends first is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import fx

from commfuse_fx.cost.collectives import CollectiveCost
from commfuse_fx.cost.consumers import Item, optimal_plan
from commfuse_fx.cost.cuts import optimal_cuts
from commfuse_fx.cost.cyclic import PIECES, CyclicMember, merged_member, piece_choices
from commfuse_fx.cost.engine import Engine, Transfer
from commfuse_fx.cost.loop import Loop
from commfuse_fx.cost.model import CostModel
from commfuse_fx.cost.numbers import EQUAL
from commfuse_fx.ir.builder import aten
from commfuse_fx.ir.collectives import is_start, is_wait, wait_of
from commfuse_fx.ir.dependence import is_view
from commfuse_fx.ir.meta import CollectiveInfo, info
from commfuse_fx.ir.program import Program

MOST_MEMBERS = 512
"""Above this many collectives of one key, neighbours are merged until so many are left, before the search begins."""

MANY_MEMBERS = 96
"""Above this many fewer sizes of buckets and pieces are tried."""

FEW_BYTES = 4 << 20
"""Up to so many bytes in all, halves and thirds of them are tried too: the sizes above are too coarse for them."""

THRESHOLDS = tuple(mebibytes * 2**20 for mebibytes in (1, 2, 4, 8, 16, 25, 32, 64))
"""Bytes at which neighbours are cut for comparison with the optimal cuts."""

MOST_MOVES = 256
"""How many cuts are played at most to move the boundaries between buckets."""


Ranges = tuple[tuple[int, int], ...]
"""Buckets of neighbours: [begin, end) of collectives in order of readiness."""


@dataclass(frozen=True)
class Grouping:
    """number: collectives of one number are to be merged. reasons: (subject, reason) lines for `explain()`."""

    number: Mapping[fx.Node, int]
    reasons: tuple[tuple[str, str], ...]


def group_collectives(
    program: Program, by_key: Mapping[Hashable, Sequence[fx.Node]], costs: CostModel, across_steps: bool
) -> Grouping:
    """The cut of each key's collectives (starts, in graph order) that minimises the predicted step time.

    Collectives that are waited for at the end of the step are cut optimally under the prices of all algorithms
    (`optimal_cuts`), compared with cuts by size, and adjusted where the engine sees that as faster; those whose
    consumers stand in between are cut by `optimal_plan`; with `across_steps`, gradients by `Loop`.
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

    def groups(self, starts: list[fx.Node], across_steps: bool) -> tuple[list[list[fx.Node]], str]:
        needs = [self._first_use(wait_of(start)) for start in starts]
        last_ready = self.place[starts[-1]]
        at_end = all(need >= last_ready and self._is_late(need) for need in needs)
        sizes = [_details(start).nbytes for start in starts]
        if not at_end:
            alpha, beta = line(self.costs, starts[0], self.program, max(sum(sizes) // 8, 1))
            return self._between(starts, needs, sizes, alpha, beta)
        if across_steps and self.program.updates:
            found = self._across(starts, sizes)
            if found is not None:
                return found
        played = _Played(self, starts, sizes)
        cuts = played.best(self._cuts(starts, sizes))
        late = played.play(cuts).arrival - self.clock[last_ready]
        text = f"the last one arrives {_ms(late)} after the last gradient, by the cost model"
        return [starts[begin:end] for begin, end in cuts], text

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
            yield _cut_by_size(sizes, threshold)
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
        return [[starts[i] for i in bucket] for bucket in plan.buckets], "fewest and earliest for their consumers"

    def _across(self, starts: list[fx.Node], sizes: list[int]) -> tuple[list[list[fx.Node]], str] | None:
        """Gradients that the next step waits for: send order and buckets by the need of its forward.

        Each further bucket is one more update. Where a step that waits for all at its end is no slower, its cuts.
        """
        loop = self._loop(starts, sizes)
        if loop is None:
            return None
        members, forward, backward = loop
        coarse = _coarse(members)
        merged = [merged_member([members[i] for i in group]) for group in coarse]
        nbytes = max(sum(sizes) // 16, 1)
        cost = self.costs.cost_of(starts[0], nbytes, mesh=self.program.mesh)
        prices = cost.latency, busy_beta(cost, nbytes), cost.host / nbytes
        message = self.costs.cluster.device.collective_overhead
        each = self._update_overhead()
        judge = Loop(forward, backward, self.price(starts[0]), message, each)
        merges = PIECES if len(merged) <= MANY_MEMBERS else PIECES[::3]
        if sum(sizes) <= FEW_BYTES:
            merges = (*merges, *(-(-sum(sizes) // parts) for parts in (2, 3)))
        pieces = PIECES if len(merged) <= MANY_MEMBERS else PIECES[2::3]
        choice, period = judge.best(
            piece_choices(forward, backward, merged, *prices, message + each, pieces=pieces, merges=merges)
        )
        across = [[i for part in group for i in coarse[part]] for group in choice.groups]
        played = _Played(self, starts, sizes, each)
        cuts = played.best(self._cuts(starts, sizes))
        in_step = played.seconds(cuts) + self.clock[-1] - self.clock[self.place[starts[-1]]] - played.rest
        if in_step <= period * (1 + EQUAL):
            groups = [starts[begin:end] for begin, end in cuts]
            return (
                groups,
                f"a step takes {_ms(in_step)} with all communication waited for at its end, by the cost model",
            )
        reason = f"a step takes {_ms(period)} with communication across steps, by the cost model"
        return [[starts[i] for i in group] for group in across], reason

    def _loop(
        self, starts: list[fx.Node], sizes: list[int]
    ) -> tuple[list[CyclicMember], list[float], list[float]] | None:
        """The step as a loop for `cost.cyclic`: members, and seconds of the blocks of forward and backward."""
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
        for name in _details(start).members:
            param = self.program.placeholder("parameter", name)
            if param is None:
                return None
            use = self._first_use(param)
            found = use if found is None else min(found, use)
        return found


class _Play(NamedTuple):
    """seconds: from the begin of the step to when every result can be used. arrival: of the last bucket."""

    seconds: float
    arrival: float


class _Played:
    """Plays cuts of some collectives on the engine, with the step's compute up to its updates.

    each: seconds of compute that every bucket but the first adds.
    """

    def __init__(self, graph: _Graph, starts: Sequence[fx.Node], sizes: Sequence[int], each: float = 0.0) -> None:
        self.graph = graph
        self.price = graph.price(starts[0])
        self.sizes = sizes
        self.each = each
        ready = [graph.clock[graph.place[start]] for start in starts]
        self.gaps = [after - before for before, after in zip([0.0, *ready], ready, strict=False)]
        self.rest = graph.compute_behind(starts[-1])
        # Without an update gradients are handed out: in memory allocated anew, divided bucket by bucket.
        handed_out = not graph.program.updates
        self.allocation = graph.costs.cluster.device.op_overhead if handed_out else 0.0
        self.casts = any(map(_casts_back, wait_of(starts[0]).users))
        self.divides = handed_out and _details(starts[0]).reduce_op == "avg"
        self.known: dict[Ranges, _Play] = {}

    def best(self, candidates: Iterable[Ranges]) -> Ranges:
        """The cuts that end first, the first of those with the fewest buckets among equals; then boundaries are moved
        as long as that helps."""
        found = tuple(dict.fromkeys(candidates))
        limit = min(map(self.seconds, found)) * (1 + EQUAL)
        cuts = min((each for each in found if self.seconds(each) <= limit), key=len)
        tried = 0
        while True:
            for moved in _moved(cuts):
                if tried == MOST_MOVES:
                    return cuts
                tried += 1
                if self.seconds(moved) < self.seconds(cuts) * (1 - EQUAL):
                    cuts = moved
                    break
            else:
                return cuts

    def seconds(self, cuts: Ranges) -> float:
        return self.play(cuts).seconds

    def play(self, cuts: Ranges) -> _Play:
        if cuts not in self.known:
            self.known[cuts] = self._play(cuts)
        return self.known[cuts]

    def _play(self, cuts: Ranges) -> _Play:
        engine = Engine()
        overhead = self.graph.costs.cluster.device.collective_overhead
        sent: list[tuple[int, int]] = []
        for begin, end in cuts:
            engine.run_each((self.allocation, *self.gaps[begin:end], overhead))
            nbytes = sum(self.sizes[begin:end])
            sent.append((engine.issue(self.price(nbytes)), nbytes))
        engine.run(self.rest)
        for handle, nbytes in sent:
            engine.wait(handle)
            engine.run(self._passes(nbytes))
        arrival = max(engine.times(handle)[2] for handle, _ in sent)
        return _Play(engine.now + (len(cuts) - 1) * self.each, arrival)

    def _passes(self, nbytes: int) -> float:
        """Seconds to make an average of a sum, in place, and to cast it."""
        device = self.graph.costs.cluster.device
        return (self.divides + self.casts) * max(device.op_overhead, 2 * nbytes / device.memory_bandwidth)


def _cut_by_size(sizes: Sequence[int], threshold: int) -> Ranges:
    """Neighbours together until they have so many bytes."""
    edges = [0]
    filled = 0
    for i, size in enumerate(sizes, start=1):
        filled += size
        if filled >= threshold or i == len(sizes):
            edges.append(i)
            filled = 0
    return tuple(pairwise(edges))


def _moved(cuts: Ranges) -> Iterator[Ranges]:
    """The cuts with one boundary elsewhere or left out, from the last one on."""
    for i in range(len(cuts) - 1, 0, -1):
        (first, edge), (_, last) = cuts[i - 1], cuts[i]
        yield (*cuts[: i - 1], (first, last), *cuts[i + 1 :])
        for distance in (1, -1, 4, -4):
            if first < edge + distance < last:
                yield (*cuts[: i - 1], (first, edge + distance), (edge + distance, last), *cuts[i + 1 :])


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


def _casts_back(node: fx.Node) -> bool:
    """Whether this casts what a collective yields: it stands where its result is used, once for each bucket."""
    return node.target is aten._to_copy.default and is_wait(node.all_input_nodes[0])


def _details(start: fx.Node) -> CollectiveInfo:
    details = info(start).collective
    assert details is not None
    return details


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
