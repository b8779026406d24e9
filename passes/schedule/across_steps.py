"""Let the communication of a step run on into the next one.

The first layers' gradients come last in the backward and their parameters are needed first in the next
forward; in their order of readiness, the step would have to wait for all of them in between. Here buckets
go onto the wire in the order in which the next step needs them, in pieces small enough to let urgent ones
pass, and each bucket is waited for, and its parameters updated, just before their first use in the next
step. What is sent when is decided at compile time, the same on every rank. (Priority and partitioning:
Jayarajan et al., "Priority-based Parameter Propagation", 2019; Peng et al., "ByteScheduler", 2019.)

Why: docs/decisions.md, "Across steps is an order of all_reduces, decided at compile time".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf

from torch import fx

from commfuse_fx.cost.model import CostModel
from commfuse_fx.ir.core.collectives import is_start, is_wait, role_of, tables_of, wait_of
from commfuse_fx.ir.core.dependence import Roots, is_opaque, is_view, written_nodes
from commfuse_fx.ir.core.meta import Stretch, info, tensor_spec
from commfuse_fx.ir.core.order import reorder
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.deferred import is_deferred
from commfuse_fx.kernels.rows import put_rows_
from commfuse_fx.passes.declaration import NO_PRICES, PassContext, PricedPass, Situation
from commfuse_fx.solvers.buckets.cyclic import CyclicMember, CyclicPlan
from commfuse_fx.solvers.buckets.loop import Loop
from commfuse_fx.solvers.buckets.piece_choices import PIECES, piece_choices
from commfuse_fx.solvers.buckets.step_problem import busy_beta

_STRETCHES = (inf, *(mebibytes * 2**20 for mebibytes in (8, 4, 3, 2, 1.5, 1)), PIECES[0])
"""Bytes from which a stretch of a bucket that is complete may be sent before the rest; tried in turn."""


@dataclass(frozen=True)
class AcrossSteps(PricedPass):
    """Bitwise neutral: the same reductions and updates on the same values, in another order."""

    name = "across_steps"
    numerics = "bitwise"
    needs_sizes = True
    requires = ("averaged", "split")

    @classmethod
    def when(cls, situation: Situation) -> AcrossSteps | None:
        return None  # a part of the schedule

    @classmethod
    def keep_notes(cls, chosen: Program, planned: Sequence[Program]) -> None:
        """Say why nothing is deferred, also where a plan within the step is taken."""
        found = [note for each in planned for note in each.notes if note.topic == cls.name]
        if found and found[0] not in chosen.notes and not any(is_deferred(node) for node in chosen.graph.nodes):
            chosen.notes.append(found[0])

    def __call__(self, program: Program, context: PassContext = NO_PRICES) -> bool:
        units = _units(program)
        if not units:
            program.note(self.name, "the step", "no update can wait for the next step: nothing is deferred")
            return False
        problem = _Problem(program, units, context.costs)
        _Emission(program, problem, problem.solve()).run()
        return True


@dataclass(frozen=True)
class _Unit:
    """A bucket with all that is to run when it has arrived, in graph order; several ones that serve one update."""

    starts: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    anchor: fx.Node  # the first node of a step that reads a parameter which these nodes write


def _units(program: Program) -> list[_Unit]:
    """Buckets whose results only serve updates."""
    roots = Roots(program.graph, program.aliases())
    owner_nodes: dict[str, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and info(node).phase == "update":
            owner_nodes.setdefault(info(node).name.split("/", 1)[0], []).append(node)
    readers = _first_readers(program, roots)
    found: list[_Unit] = []
    seen: dict[fx.Node, None] = {}
    for start in program.collectives():
        if start in seen or not info(start).writes or tables_of(start) is not None:
            continue
        nodes = _descendants(start, owner_nodes)
        if not nodes:
            continue
        sent = (node.all_input_nodes[0] for node in nodes if is_wait(node))
        starts = tuple(each for each in sent if each not in nodes)
        seen.update(dict.fromkeys(starts))
        changed = dict.fromkeys(roots[value] for node in nodes for value in written_nodes(node))
        reader = min((readers[root] for root in changed if root in readers), default=None)
        if any(_is_shared(program, root) for root in changed):
            continue  # updates of such parameters keep their order
        if reader is not None and info(reader).phase in ("forward", "backward"):
            found.append(_Unit(starts, nodes, reader))
    return found


def _is_shared(program: Program, root: fx.Node) -> bool:
    """Whether other parameters or buffers lie in this memory."""
    source = program.sources.get(root)
    return source is not None and source.kind == "parameter" and bool(program.params[source.name].shares)


def _descendants(start: fx.Node, owner_nodes: dict[str, list[fx.Node]]) -> tuple[fx.Node, ...] | None:
    """The wait, all that follows from it, the rest of the updates it serves, and the same of other buckets that these
    need; None if others need that too."""
    found: dict[fx.Node, None] = {}
    pending = [wait_of(start)]
    while pending:
        node = pending.pop()
        if node in found:
            continue
        if node.op == "output" or is_opaque(node):
            return None  # nobody knows what an opaque node changes, nor who reads that first
        if is_start(node):
            return None  # a gradient that is sent on, to be gathered say: what follows waits for two collectives
        found[node] = None
        pending.extend(node.users)
        if info(node).phase == "update":
            pending.extend(owner_nodes.get(info(node).name.split("/", 1)[0], ()))
        if node.target is put_rows_:
            pending.extend(_waits_of_buckets(node))
    for node in found:
        for value in node.all_input_nodes:
            # Fed by the waits, by inputs of the step, or by nothing: then it can run whenever the buckets are there.
            if value not in found and value.op == "call_function" and not is_wait(node) and not _is_early(value):
                return None
    return tuple(sorted(found))


def _waits_of_buckets(put: fx.Node) -> Iterator[fx.Node]:
    """Those that bring a gradient, and those rows of it that were sent again."""
    for value in put.all_input_nodes:
        while not is_wait(value) and value.all_input_nodes:
            value = value.all_input_nodes[0]
        if is_wait(value) and info(value.all_input_nodes[0]).writes:
            yield value


def _is_early(value: fx.Node) -> bool:
    """Whether a value is there long before any bucket: the numbers of rows, or a part of those of several tables."""
    while is_view(value):
        value = value.all_input_nodes[0]
    return is_wait(value) and role_of(value.all_input_nodes[0]) == "rows"


def _first_readers(program: Program, roots: Roots) -> dict[fx.Node, fx.Node]:
    """For each block of memory the first node that works on it; views do not."""
    found: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and not is_view(node):
            for value in node.all_input_nodes:
                found.setdefault(roots[value], node)
    return found


@dataclass(frozen=True)
class _Part:
    """A stretch of a bucket that is complete once `ready` has run."""

    unit: int
    start: fx.Node
    stretch: Stretch
    ready: fx.Node


class _Problem:
    """The step as numbers: blocks of compute, what they need and what they make ready."""

    def __init__(self, program: Program, units: list[_Unit], costs: CostModel) -> None:
        self.units = units
        self.costs = costs
        self.mesh = program.mesh
        deferred = dict.fromkeys(node for unit in units for node in unit.nodes)
        starts = dict.fromkeys(start for unit in units for start in unit.starts)
        self.body = [
            node
            for node in program.graph.nodes
            if node.op == "call_function" and node not in deferred and node not in starts
        ]
        self.position = {node: i for i, node in enumerate(self.body)}
        self.seconds = [costs.compute_seconds(node) for node in self.body]
        self.update_seconds = [sum(costs.compute_seconds(node) for node in unit.nodes) for unit in units]
        self.parts: list[_Part] = []

    def _parts(self, number: int, start: fx.Node, nbytes: float) -> list[_Part]:
        """A bucket that fills up over a long time is taken apart into stretches, complete earlier, of at least so many
        bytes."""
        smallest = nbytes / tensor_spec(start).itemsize
        entries = sorted(info(start).writes, key=lambda entry: entry[1].begin)
        parts: list[_Part] = []
        begin, ready = 0, entries[0][0]
        for i, (write, stretch) in enumerate(entries):
            ready = max(ready, write, key=self.position.__getitem__)
            if stretch.end - begin >= smallest or i == len(entries) - 1:
                parts.append(_Part(number, start, Stretch(begin, stretch.end), ready))
                if i + 1 < len(entries):
                    begin, ready = stretch.end, entries[i + 1][0]
        return parts

    def solve(self) -> CyclicPlan:
        """Send order, and the place of every part's update, by earliest need first.

        `parts`, which the plan refers to, are the buckets as they are, or stretches of them: what ends first.
        """
        found: list[tuple[float, CyclicPlan, list[_Part]]] = []
        for nbytes in _STRETCHES:
            parts = [
                part
                for i, unit in enumerate(self.units)
                for start in unit.starts
                for part in self._parts(i, start, nbytes)
            ]
            if not found or len(parts) != len(found[-1][2]):
                self.parts = parts
                found.append((*self._plan(), parts))
        _, plan, self.parts = min(found, key=lambda each: each[0])
        self._blocks()
        return plan

    def _blocks(self) -> tuple[list[float], list[int], list[float], dict[fx.Node, int]]:
        """Forward and backward for the present parts."""
        self.turn = min(self.position[part.ready] for part in self.parts)
        return (*self._forward(), *self._backward())

    def _plan(self) -> tuple[float, CyclicPlan]:
        """The best plan for the present parts, and its period."""
        biggest = max((part.start for part in self.parts), key=lambda start: tensor_spec(start).nbytes)
        cost = self.costs.cost_of(biggest, mesh=self.mesh)
        nbytes = tensor_spec(biggest).nbytes
        forward, needs, backward, readies = self._blocks()
        last = {part.unit: i for i, part in sorted(enumerate(self.parts), key=lambda each: readies[each[1].ready])}
        members = [
            CyclicMember(
                part.stretch.size * tensor_spec(part.start).itemsize,
                readies[part.ready],
                needs[part.unit],
                # A bucket is updated as a whole.
                self.update_seconds[part.unit] if last[part.unit] == i else 0.0,
            )
            for i, part in enumerate(self.parts)
        ]
        message = self.costs.cluster.device.collective_overhead
        prices = (cost.latency, busy_beta(cost, nbytes), cost.host / nbytes, message)
        price = cache(lambda n: self.costs.transfer_of(biggest, n, mesh=self.mesh))
        loop = Loop(forward, backward, price, message)
        choice, period = loop.best(piece_choices(forward, backward, members, *prices, merges=()))
        part_of = [part for (part,) in choice.groups]  # the plan counts parts in order of readiness
        return period, replace(
            choice.plan,
            order=tuple((part_of[i], begin, end) for i, begin, end in choice.plan.order),
            update_order=tuple((part_of[i], block) for i, block in choice.plan.update_order),
        )

    def _forward(self) -> tuple[list[float], list[int]]:
        """Seconds of the blocks that end where parameters are needed, and for each unit the block that needs it."""
        wanted = [min(self.position[unit.anchor], self.turn - 1) for unit in self.units]
        self.cuts = sorted({0, *wanted})
        seconds = [
            sum(self.seconds[begin:end]) for begin, end in zip(self.cuts, [*self.cuts[1:], self.turn], strict=True)
        ]
        block = {cut: i for i, cut in enumerate(self.cuts)}
        return seconds, [block[position] for position in wanted]

    def _backward(self) -> tuple[list[float], dict[fx.Node, int]]:
        """Seconds of the blocks that end where parts are complete, and which block completes what."""
        ends = sorted({self.position[part.ready] for part in self.parts})
        begins = [self.turn, *(end + 1 for end in ends)]
        seconds = [sum(self.seconds[begin : end + 1]) for begin, end in zip(begins, ends, strict=False)]
        rest = sum(self.seconds[ends[-1] + 1 :])
        return [*seconds, rest], {self.body[end]: i for i, end in enumerate(ends)}


class _Emission:
    """Writes a plan into the graph: starts and pieces where they are sent, the rest into the next step."""

    def __init__(self, program: Program, problem: _Problem, plan: CyclicPlan) -> None:
        self.program = program
        self.problem = problem
        self.plan = plan
        self.starts_after: dict[int, list[fx.Node]] = {}

    def run(self) -> None:
        self._send()
        deferred = self._defer()
        nodes = list(self.program.graph.nodes)
        moved = dict.fromkeys(deferred)
        body = dict.fromkeys(self.problem.body)
        starts = dict.fromkeys(start for unit in self.problem.units for start in unit.starts)
        order = [n for n in nodes[:-1] if n not in moved and n not in body and n not in starts]
        for position, node in enumerate(self.problem.body):
            order.append(node)
            order.extend(self.starts_after.get(position, ()))
        reorder(self.program.graph, [*order, *deferred, nodes[-1]])

    def _send(self) -> None:
        problem = self.problem
        messages = [(problem.parts[part], begin, end) for part, begin, end in self.plan.order]
        left = Counter(part.start for part, _, _ in messages)
        is_cut = {start: count > 1 for start, count in left.items()}
        issue = 0
        for part, begin, end in messages:
            issue = max(issue, problem.position[part.ready])
            start = part.start
            itemsize = tensor_spec(start).itemsize
            stretch = Stretch(part.stretch.begin + begin // itemsize, part.stretch.begin + end // itemsize)
            left[start] -= 1
            if left[start]:
                carrier = self.starts_after[issue][-1] if issue in self.starts_after else problem.body[issue]
                info(carrier).sends = (*info(carrier).sends, (start, stretch))
            else:
                self.starts_after.setdefault(issue, []).append(start)
                info(start).rest = (stretch,) if is_cut[start] else ()

    def _defer(self) -> list[fx.Node]:
        """All waits and updates in the order in which the next step runs them."""
        problem = self.problem
        # A bucket that was taken apart is waited for with its last part; blocks do not fall along the update order.
        block_of = {problem.parts[part].unit: block for part, block in self.plan.update_order}
        deferred: list[fx.Node] = []
        for number in _by_last_part(self.plan, problem):
            unit = problem.units[number]
            anchor = problem.body[problem.cuts[block_of[number]]]
            for node in sorted(unit.nodes, key=lambda node: not is_wait(node)):
                info(node).next_step = anchor
                deferred.append(node)
        return deferred


def _by_last_part(plan: CyclicPlan, problem: _Problem) -> list[int]:
    """Units in the order in which their last parts are updated."""
    order: dict[int, None] = {}
    for part, _ in plan.update_order:
        unit = problem.parts[part].unit
        order.pop(unit, None)
        order[unit] = None
    return list(order)
