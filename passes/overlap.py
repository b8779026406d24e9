"""Schedule, first form: start collectives at the earliest legal point, wait at the latest.

Compute keeps its order. Starts keep one order, the same on every rank, because it follows from the
graph alone. Everything that changes what the user owns comes after the last wait, so that a step that
fails has changed nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from commfuse_fx.ir.collectives import is_start, is_wait, wait_of
from commfuse_fx.ir.dependence import Dependence, draws_random_numbers, is_opaque, is_view, written_nodes
from commfuse_fx.ir.meta import info
from commfuse_fx.ir.order import reorder
from commfuse_fx.ir.program import Program


@dataclass(frozen=True)
class Overlap:
    name: str = "overlap"
    requires: tuple[str, ...] = ("averaged",)
    ensures: tuple[str, ...] = ("scheduled",)

    def __call__(self, program: Program) -> bool:
        if not any(True for _ in program.collectives()):
            return False
        before = list(program.graph.nodes)
        order = _Order(program).build()
        reorder(program.graph, order)
        return order != before


class _Order:
    """Emits compute in its old order, starts as soon as their inputs are there, waits when somebody needs them."""

    def __init__(self, program: Program) -> None:
        self.nodes = list(program.graph.nodes)
        self.dependence = Dependence(program.graph, program.aliases())
        self.missing: dict[fx.Node, int] = {}
        self.starts_after: dict[fx.Node, list[fx.Node]] = {}
        self.emitted: dict[fx.Node, None] = {}
        self.lazy = self._lazy_nodes()
        for node in self.nodes:
            if is_start(node):
                needed = self.dependence.direct[node]
                self.missing[node] = len(needed)
                for other in needed:
                    self.starts_after.setdefault(other, []).append(node)

    def _lazy_nodes(self) -> dict[fx.Node, None]:
        """Waits, and what merely reshapes or scales their results: they stand where the first real use is."""
        lazy: dict[fx.Node, None] = {}
        for node in self.nodes:
            if is_wait(node):
                lazy[node] = None
            elif node.op == "call_function" and node.all_input_nodes and not is_start(node) and self._is_pure(node):
                if all(value in lazy for value in node.all_input_nodes):
                    lazy[node] = None
        return lazy

    @staticmethod
    def _is_pure(node: fx.Node) -> bool:
        return is_view(node) or not (written_nodes(node) or draws_random_numbers(node.target) or is_opaque(node))

    def build(self) -> list[fx.Node]:
        late: list[fx.Node] = []
        output = self.nodes[-1]
        for node in self.nodes[:-1]:
            if info(node).phase == "update" and node.op == "call_function":
                late.append(node)
            elif node not in self.lazy and not is_start(node):
                self._emit(node)
        for start in [node for node in self.emitted if is_start(node)]:
            self._emit(wait_of(start))
        for node in late:
            self._emit(node)
        for node in self.nodes[:-1]:
            self._emit(node)
        return [*self.emitted, output]

    def _emit(self, node: fx.Node) -> None:
        """Emit a node after whatever it still needs; iterative, since chains of lazy nodes can be long."""
        pending = [node]
        while pending:
            current = pending[-1]
            if current in self.emitted:
                pending.pop()
                continue
            needed = [other for other in self.dependence.direct[current] if other not in self.emitted]
            if needed:
                pending.extend(reversed(needed))
                continue
            pending.pop()
            self.emitted[current] = None
            for start in self.starts_after.get(current, ()):
                self.missing[start] -= 1
                if self.missing[start] == 0:
                    pending.append(start)
