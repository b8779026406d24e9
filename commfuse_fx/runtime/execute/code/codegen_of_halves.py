"""Generate Python for a program of two halves: one function for the forward, and one for the backward."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from commfuse_fx.ir.core.halves import crossing, outputs_of, split
from commfuse_fx.ir.core.program import Program
from commfuse_fx.runtime.execute.code.codegen import Compiled, Generator, Hooks, Sends
from commfuse_fx.runtime.execute.code.generated_code import Code


def generate_half(
    half: str,
    program: Program,
    bind: Callable[[fx.Node], Any],
    hooks: Hooks,
    sends: Sends,
    results: Mapping[fx.Node, Callable[[Any], Any]],
    views: Mapping[fx.Node, Sequence[fx.Node]],
    compiled: Compiled,
    once: Mapping[fx.Node, Any],
) -> Code:
    """Compile the "forward" or the "backward" of a program of two halves to a function of this name.

    Further arguments are those of `generate`.

    The forward takes the list of inputs; it returns the outputs, and the tuple of values that are saved for the
    backward. The backward takes one list: the saved values, the gradients that parameters hold and, as its last item,
    the list of the outputs' gradients. It empties the list, and returns the gradients of parameters and inputs. Where
    autograd computes them it is a generator: it yields the numbers of the gradients, and is sent these one by one.
    """
    made = _HalfGenerator(program, bind, hooks, sends, results, views, compiled, once)
    if half == "forward":
        made.forward()
    else:
        made.backward()
    return made.code(half)


def saved_values(program: Program) -> list[fx.Node]:
    """The values that a forward saves for its backward, in order."""
    return [node for node in crossing(program) if not _is_held(program, node)]


def inputs_of_backward(program: Program) -> list[fx.Node]:
    """What a backward takes, in order."""
    held = [node for node in program.sources if _is_held(program, node)]
    return [*saved_values(program), *held, program.loss]


def _is_held(program: Program, node: fx.Node) -> bool:
    source = program.sources.get(node)
    return source is not None and source.kind == "gradient"


class _HalfGenerator(Generator):
    def forward(self) -> None:
        program = self.program
        saved = saved_values(program)
        inputs = [node for node in program.sources if not _is_held(program, node)]
        returned = f"({self.literal(program.loss.args[0])}, {self.tuple([self.variable[node] for node in saved])})"
        keep = dict.fromkeys([*saved, *outputs_of(program)])
        self.function("forward", inputs, split(program)[0], returned, keep)

    def backward(self) -> None:
        program = self.program
        late: Sequence[fx.Node] = split(program)[1]
        if program.by_autograd:
            late = self._as_they_arrive(late)
        output = self.nodes[-1]
        results: Sequence[Any] = output.args[0][1:]
        self.function(
            "backward",
            inputs_of_backward(program),
            late,
            self.tuple([self.literal(value) for value in results]),
            keep=dict.fromkeys(output.all_input_nodes),
            empties=True,
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
