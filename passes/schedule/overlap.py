"""Start collectives at the earliest legal point, and wait for them at the latest.

Compute keeps its order. Starts keep one order, the same on every rank, because it follows from the
graph alone. Everything that changes what the user owns comes after the last wait, so that a step that
fails has changed nothing.

Why: docs/decisions.md, "All updates stand behind the last wait, unless you ask for across_steps".
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import fx

from commfuse_fx.cost.model import CostModel
from commfuse_fx.ir.core.collectives import IN_PLACE, is_start, is_wait, kind_of, role_of, wait_of
from commfuse_fx.ir.core.dependence import Dependence, is_opaque, is_view, written_nodes
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.order import reorder, stable_sort
from commfuse_fx.ir.core.owner_ops import of_owner
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.random_draws import draws_random_numbers
from commfuse_fx.passes.declaration import Pass, Situation

_IN_PLACE = tuple(IN_PLACE.values())


@dataclass(frozen=True)
class Overlap(Pass):
    name = "overlap"
    numerics = "bitwise"
    requires = ("averaged",)
    ensures = ("scheduled",)

    @classmethod
    def when(cls, situation: Situation) -> Overlap | None:
        return cls() if situation.schedules and not situation.by_cost else None

    def __call__(self, program: Program) -> bool:
        if not any(True for _ in program.collectives()):
            return False
        before = list(program.graph.nodes)
        order = _Order(program).build()
        reorder(program.graph, order)
        return order != before


def can_start_late(program: Program) -> bool:
    """Whether there are collectives that allocate memory."""
    return any(is_start(node) and node.target not in _IN_PLACE for node in program.graph.nodes)


def start_late(program: Program, costs: CostModel, lead: float, dependence: Dependence) -> None:
    """Start collectives that allocate memory later: `lead` times the step's compute time ahead of their waits.

    They keep their order. What is computed only to be sent, such as a concatenation, moves along. `dependence` is
    that of the program.
    """
    nodes = list(program.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    clock = list(accumulate((costs.compute_seconds(node) for node in nodes), initial=0.0))
    position: dict[fx.Node, float] = {node: float(i) for i, node in enumerate(nodes)}
    before = dict(dependence.direct)
    order = [node for node in nodes if is_start(node)]
    latest = 0.0
    for previous, start in zip([None, *order], order, strict=False):
        if start.target not in _IN_PLACE:
            begin = clock[place[wait_of(start)]] - lead * clock[-1]
            late = float(bisect_left(clock, begin))
            if late > position[start]:
                position[start] = late
                reason = f"it starts at most {lead:.0%} of the step's compute ahead of its wait: its memory must fit"
                program.note("memory cap", info(start).name, reason)
        latest = position[start] = max(latest, position[start])
        for node in _only_for(start):
            position[node] = max(position[node], position[start])
        if previous is not None:
            before[start] = [*before[start], previous]
    stable_sort(program.graph, position, before)


def _leaves_a_part(node: fx.Node) -> bool:
    """Whether a collective leaves a rank a part of a whole gradient: its rows, or all of it on one rank alone."""
    return is_start(node) and kind_of(node) in ("reduce_scatter", "reduce") and role_of(node) == "gradient"


def _left_of(start: fx.Node) -> list[fx.Node]:
    """The nodes behind which a rank has its part of a gradient alone."""
    found = [wait_of(start)]
    if kind_of(start) == "reduce":
        for node in found:
            found.extend(user for user in node.users if node.target is not of_owner and _is_pure(user))
    return found


def _only_for(start: fx.Node) -> list[fx.Node]:
    """Pure nodes that nobody but this collective needs, its inputs first."""
    found: dict[fx.Node, None] = {start: None}
    pending = [start]
    while pending:
        for value in pending.pop().all_input_nodes:
            if value.op == "call_function" and _is_pure(value) and all(user in found for user in value.users):
                found[value] = None
                pending.append(value)
    return [node for node in found if node is not start]


def _is_pure(node: fx.Node) -> bool:
    if is_start(node) or is_wait(node):
        return False
    return is_view(node) or not (written_nodes(node) or draws_random_numbers(node) or is_opaque(node))


class _Order:
    """Emits compute in its old order, starts as soon as their inputs are there, waits when somebody needs them.

    Few parameters are gathered at once: one ahead of that which compute uses, and two after an update.
    """

    def __init__(self, program: Program) -> None:
        self.nodes = list(program.graph.nodes)
        self.dependence = Dependence(program.graph, program.aliases())
        self.missing: dict[fx.Node, int] = {}  # start -> how many of the nodes it needs have not been emitted
        self.starts_after: dict[fx.Node, list[fx.Node]] = {}
        self.emitted: dict[fx.Node, None] = {}
        self.lazy = self._lazy_nodes()
        for node in self.nodes:
            if is_start(node):
                needed = self._needs(node)
                self.missing[node] = len(needed)
                for other in needed:
                    self.starts_after.setdefault(other, []).append(node)
        gathers = [node for node in self.nodes if is_start(node) and role_of(node) == "parameter"]
        updated = [node for node in gathers if info(node).phase == "update"]
        used = [node for node in gathers if info(node).phase != "update"]
        for one, other in (*pairwise(used), *zip(updated, updated[2:], strict=False)):
            self.missing[other] += 1
            self.starts_after.setdefault(wait_of(one), []).append(other)
        for one, other in pairwise(updated):  # the wire has the next one to carry when this one is there
            self.dependence.direct[wait_of(one)] = [*self.dependence.direct[wait_of(one)], other]
        divided = program.config.parallel_optimizer
        if divided is not None and divided.level > 1:  # a gradient is whole until its rows have arrived
            for one, other in pairwise(filter(_leaves_a_part, self.nodes)):
                self.dependence.direct[other] = [*self.dependence.direct[other], *_left_of(one)]

    def _needs(self, start: fx.Node) -> list[fx.Node]:
        """What has to be there before a start. What is made for it alone of inputs that nothing writes to, such as a
        cast or a concatenation of parameters, is made when it starts."""
        direct, own = self.dependence.direct, dict.fromkeys((start, *_only_for(start)))
        needed = dict.fromkeys(other for node in own for other in direct[node] if other not in own)
        is_early = info(start).phase != "update" and all(other.op == "placeholder" for other in needed)
        return [*needed] if is_early else direct[start]

    def _lazy_nodes(self) -> dict[fx.Node, None]:
        """Waits, and what merely reshapes or scales their results: they stand where the first real use is."""
        lazy: dict[fx.Node, None] = {}
        for node in self.nodes:
            if is_wait(node):
                lazy[node] = None
            elif node.op == "call_function" and (inputs := node.all_input_nodes):
                if all(value in lazy for value in inputs) and _is_pure(node):
                    lazy[node] = None
        return lazy

    def build(self) -> list[fx.Node]:
        late: list[fx.Node] = []
        output = self.nodes[-1]
        self._emit_inputs()
        for node in self.nodes[:-1]:
            if info(node).phase == "update" and node.op == "call_function":
                late.append(node)
            elif node not in self.lazy and node not in self.missing:
                self._emit(node)
        for start in [node for node in self.emitted if node in self.missing]:
            self._emit(wait_of(start))
            self._emit_ready_users(wait_of(start))
        for node in late:
            self._emit(node)
        for node in self.nodes[:-1]:
            self._emit(node)
        return [*self.emitted, output]

    def _emit_inputs(self) -> None:
        """All of them, and then the starts that need nothing else."""
        inputs = [node for node in self.nodes if node.op == "placeholder"]
        self.emitted.update(dict.fromkeys(inputs))
        ready: list[fx.Node] = []
        for start in (start for node in inputs for start in self.starts_after.get(node, ())):
            self.missing[start] -= 1
            if self.missing[start] == 0:
                ready.append(start)
        for start in ready:
            self._emit(start)

    def _emit_ready_users(self, node: fx.Node) -> None:
        """What else follows from a result, but for updates: it runs while the next result is on the wire."""
        pending = list(node.users)
        while pending:
            user = pending.pop()
            if info(user).phase == "update" or user in self.emitted or user.op == "output":
                continue
            if all(other in self.emitted for other in self.dependence.direct[user]):
                self._emit(user)
                pending.extend(user.users)

    def _emit(self, node: fx.Node) -> None:
        """Emit a node after whatever it still needs; iterative, since chains of lazy nodes can be long."""
        pending = [node]
        emitted, direct = self.emitted, self.dependence.direct
        while pending:
            current = pending[-1]
            if current in emitted:
                pending.pop()
                continue
            needed = [other for other in direct[current] if other not in emitted]
            if needed:
                pending.extend(reversed(needed))
                continue
            pending.pop()
            emitted[current] = None
            for start in self.starts_after.get(current, ()):
                self.missing[start] -= 1
                if self.missing[start] == 0:
                    pending.append(start)
