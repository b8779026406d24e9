"""Generate Python for a program of two halves: a function for the forward, and one for the backward."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from commfuse_fx.ir.halves import crossing, outputs_of, split
from commfuse_fx.ir.meta import info
from commfuse_fx.ir.program import Program
from commfuse_fx.runtime.execute.codegen import Compiled, Generator, Hooks, Sends, execute, serial, without_handing_on


@dataclass(frozen=True)
class Halves:
    """The code of a program of two halves.

    forward: takes the list of inputs; returns the outputs, and the values that are saved for the backward.
    backward: takes one list: the saved values, the gradients that parameters hold and, as its last item, the list of
        the outputs' gradients. It empties the list, and returns the gradients of parameters and inputs. Where autograd
        computes them it is a generator: it yields the numbers of the gradients, and is sent these one by one.
    saved: the names of the saved values, in order.
    """

    forward: Callable[[list[Any]], tuple[list[Any], tuple[Any, ...]]]
    backward: Callable[[list[Any]], Any]
    saved: tuple[str, ...]
    source: str
    filename: str
    node_of_line: Mapping[int, fx.Node]
    handed_on: Mapping[fx.Node, int]
    namespace: dict[str, Any]

    def without(self, nodes: Iterable[fx.Node]) -> Halves:
        """The same code, in which the results of these nodes no longer go through a function."""
        source, remaining = without_handing_on(self.source, self.handed_on, nodes)
        made = execute(source, self.filename, dict(self.namespace))
        return replace(self, forward=made["forward"], backward=made["backward"], source=source, handed_on=remaining)


def generate_halves(
    program: Program,
    bind: Callable[[fx.Node], Any],
    hooks: Hooks,
    sends: Sends,
    results: Mapping[fx.Node, Callable[[Any], Any]],
    views: Mapping[fx.Node, Sequence[fx.Node]],
    compiled: Compiled,
    once: Mapping[fx.Node, Any],
) -> Halves:
    """Compile a program of two halves to Python; the arguments are those of `generate`."""
    return _HalvesGenerator(program, bind, hooks, sends, results, views, compiled, once).halves()


class _HalvesGenerator(Generator):
    def halves(self) -> Halves:
        program = self.program
        early, late = split(program)
        if program.by_autograd:
            late = self._as_they_arrive(late)
        saved = [node for node in crossing(program) if not self._is_held(node)]
        inputs = [node for node in program.sources if not self._is_held(node)]
        outputs = program.loss.args[0]
        returned = f"({self.literal(outputs)}, {self.tuple([self.variable[node] for node in saved])})"
        self.function("forward", inputs, early, returned, keep=dict.fromkeys([*saved, *outputs_of(program)]))
        held = [node for node in program.sources if self._is_held(node)]
        output = self.nodes[-1]
        results: Sequence[Any] = output.args[0][1:]
        self.function(
            "backward",
            [*saved, *held, program.loss],
            late,
            self.tuple([self.literal(value) for value in results]),
            keep=dict.fromkeys(output.all_input_nodes),
            empties=True,
        )
        source = "\n".join(self.lines) + "\n"
        filename = f"<commfuse module {next(serial)}>"
        made = execute(source, filename, self.namespace)
        names = tuple(info(node).name for node in saved)
        return Halves(
            made["forward"], made["backward"], names, source, filename, self.node_of_line, self.handed_on, made
        )

    def _as_they_arrive(self, late: Sequence[fx.Node]) -> list[fx.Node]:
        """The backward, in which each gradient is asked for where it is first used."""
        found: dict[fx.Node, None] = {}
        for node in late:
            if not self._arrives(node):
                found.update(dict.fromkeys([*filter(self._arrives, node.all_input_nodes), node]))
        found.update(dict.fromkeys(late))
        return list(found)

    def _arrives(self, node: fx.Node) -> bool:
        return bool(self.program.by_autograd) and node.target is operator.getitem and node.args[0] is self.program.loss

    def _statement(self, node: fx.Node) -> None:
        super()._statement(node)
        if self._arrives(node):
            self.lines[-1] = f"    {self.variable[node]} = yield {self.literal(node.args[1])}"

    def _is_held(self, node: fx.Node) -> bool:
        source = self.program.sources.get(node)
        return source is not None and source.kind == "gradient"
