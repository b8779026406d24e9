"""A stopwatch tells what each compute node of a step takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from statistics import mean
from typing import Any

from torch import fx

from commfuse_fx.cost.model import PER_ELEMENT, PER_VIEW, profile_key, update_elements
from commfuse_fx.cost.roofline import is_free
from commfuse_fx.ir.core.collectives import is_start, is_wait
from commfuse_fx.ir.core.dependence import written_nodes
from commfuse_fx.ir.core.halves import split
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.naming import op_label
from commfuse_fx.ir.core.program import Program
from commfuse_fx.measure.clocks import clock_of
from commfuse_fx.runtime.execute.code.bindings import bound
from commfuse_fx.runtime.execute.code.codegen import first_commit
from commfuse_fx.runtime.execute.code.codegen_of_halves import inputs_of_backward
from commfuse_fx.runtime.execute.code.recorded import as_recorded, computed
from commfuse_fx.runtime.execute.executor import Executor
from commfuse_fx.runtime.execute.interrupts import interrupts_deferred


class Stopwatch:
    """Runs a program node by node, in graph order, with a clock around every compute node.

    Every collective ends where it begins, so that no node is slowed by what is on the wire. Of a program of two halves
    it runs the backward.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.clock = clock_of(executor.devices)
        self.inputs, self.nodes = _inputs_and_nodes(executor.program)
        self.sends = executor.wire.sends()
        self.callables = {node: bound(executor._bind(node)) for node in self.nodes if node.op == "call_function"}
        self.computed = computed(executor.program)
        self.made_once = executor.made_once
        self.dead_after = self._lifetimes()
        sending = (node for node in self.nodes if info(node).sends or info(node).collective is not None)
        self.first_to_send = next(sending, None)
        self.first_update = next(iter(self.nodes[first_commit(executor.program, self.nodes) :]), None)

    def _lifetimes(self) -> dict[fx.Node, list[fx.Node]]:
        """For each node, the values that nobody needs once it has run."""
        last_use = {value: node for node in self.nodes for value in node.all_input_nodes}
        dead: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes:
            if node in last_use:
                dead.setdefault(last_use[node], []).append(node)
            elif node.op == "placeholder" or not written_nodes(node):
                dead.setdefault(node, []).append(node)
        return dead

    def run(
        self, given: Sequence[Any], agree: Callable[[], None] = lambda: None
    ) -> tuple[tuple[Any, ...], dict[str, float]]:
        """One step, whose updates are applied. Returns the program's outputs, and seconds by `profile_key`.

        given: the values of the placeholders, or what a backward takes. agree: called before the first collective.
        Nothing has been updated if it fails before the first update; what the collectives left is forgotten then.
        """
        try:
            outputs, seconds = self._run(given, agree)
        except BaseException:
            self.executor.wire.abandon()
            self.executor.storage.pool.forget_memory()
            raise
        return outputs, self._by_key(seconds)

    def _run(self, given: Sequence[Any], agree: Callable[[], None]) -> tuple[tuple[Any, ...], dict[fx.Node, float]]:
        values: dict[fx.Node, Any] = dict(zip(self.inputs, given, strict=True))
        taken: dict[fx.Node, tuple[Any, Any] | None] = {}
        with ExitStack() as uninterrupted:
            outputs = self._run_nodes(values, taken, agree, uninterrupted)
        self.clock.settle()
        seconds = {node: 0.0 if marks is None else self.clock.seconds(*marks) for node, marks in taken.items()}
        return outputs, seconds

    def _run_nodes(
        self,
        values: dict[fx.Node, Any],
        taken: dict[fx.Node, tuple[Any, Any] | None],
        agree: Callable[[], None],
        uninterrupted: ExitStack,
    ) -> tuple[Any, ...]:
        outputs: tuple[Any, ...] = ()
        for node in self.nodes:
            if node is self.first_to_send:
                agree()
            if node is self.first_update:
                uninterrupted.enter_context(interrupts_deferred())
            if node.op == "get_attr":
                values[node] = self.executor.program.constants[str(node.target)]
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                begin = self.clock.begin()
                value = self.callables[node](*args, **kwargs)
                end = self.clock.mark()
                values[node] = as_recorded(value, info(node).spec) if node in self.computed else value
                del value
                if is_start(node):
                    self._complete()
                elif not (is_wait(node) or info(node).once):
                    taken[node] = None if node in self.made_once else (begin, end)
                for send, storage in self.sends.get(node, ()):
                    send(values[storage])
                    self._complete()
                del args, kwargs
            elif node.op == "output":
                found: Any = fx.node.map_arg(node.args[0], values.__getitem__)
                outputs = tuple(found[1:] if self.executor.program.has_two_halves else found)  # without its loss
            for value in self.dead_after.get(node, ()):
                values.pop(value, None)
        return outputs

    def _complete(self) -> None:
        self.executor.wire.complete()
        self.clock.settle()

    @staticmethod
    def _by_key(seconds: Mapping[fx.Node, float]) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        updates: dict[str, list[tuple[float, float]]] = {}
        views: dict[str, list[float]] = {}
        for node, took in seconds.items():
            found.setdefault(profile_key(node), []).append(took / info(node).share)
            if is_free(node):
                views.setdefault(PER_VIEW + op_label(node.target), []).append(took)
            if info(node).phase == "update" and update_elements(node):
                updates.setdefault(PER_ELEMENT + op_label(node.target), []).append((took, update_elements(node)))
        rates = {key: sum(took for took, _ in each) / sum(count for _, count in each) for key, each in updates.items()}
        return {key: mean(each) for key, each in (*found.items(), *views.items())} | rates


def _inputs_and_nodes(program: Program) -> tuple[list[fx.Node], list[fx.Node]]:
    """What runs, and what it is given."""
    nodes = list(program.graph.nodes)
    if program.has_two_halves:
        return inputs_of_backward(program), [*split(program)[1], program.output]
    return [node for node in nodes if node.op == "placeholder"], nodes
