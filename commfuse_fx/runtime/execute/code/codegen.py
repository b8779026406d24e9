"""Generate Python for a scheduled graph.

Each node becomes one statement, its op is a global of the generated module, and each value is dropped after its last
use. The code has two functions: `produce` runs all nodes that can fail, and `commit` all that change parameters,
buffers or optimizer states. Nodes that run in the following step (`NodeInfo.next_step`) become functions of their own,
the tail.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.collectives import is_wait
from commfuse_fx.ir.core.dependence import Roots, is_opaque, written_nodes
from commfuse_fx.ir.core.meta import info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.regions import Region, regions_of
from commfuse_fx.runtime.execute.code.bindings import bound
from commfuse_fx.runtime.execute.code.generated_code import Code

"""Numbers for the names of generated files: Python tells sources apart by their file names."""


Hooks = dict[fx.Node, list[Callable[[], None]]]
"""Functions that run just before a node."""

Sends = Mapping[fx.Node, Sequence[tuple[Callable[[Any], None], fx.Node]]]
"""Functions that run just after a node, each with the node whose value it gets."""


Compiled = Mapping[int, Callable[[list[Any]], Sequence[Any]]]
"""By the number of a region the function that it was compiled to. It takes the list of the region's inputs, which it
empties, and returns its outputs."""


@dataclass(frozen=True)
class TailPart:
    """A tail part is a function for consecutive nodes of the tail.

    before: the node of the following step before which the part runs.
    run: the function. It takes the list of the tail's values, and changes it.
    waits: whether the part only waits for collectives. Such a part may run again after an interrupt, others may not.
    nodes: the nodes of the part.
    """

    before: fx.Node
    run: Callable[[list[Any]], None]
    waits: bool
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Generated:
    """The generated code of one program.

    produce: takes the list of inputs; returns the values for `commit`, and the list of values for the tail.
    commit: takes the values from `produce`; returns the outputs of the program.
    tail: the parts of the tail, in order.
    """

    code: Code
    produce: Callable[[list[Any]], tuple[tuple[Any, ...], list[Any]]]
    commit: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    tail: tuple[TailPart, ...]

    def without(self, nodes: Iterable[fx.Node]) -> Generated:
        """The same code, in which the results of these nodes no longer go through a function. The tail is kept."""
        code = self.code.without(nodes)
        return Generated(code, code.namespace["produce"], code.namespace["commit"], self.tail)


def generate(
    program: Program,
    bind: Callable[[fx.Node], Any],
    hooks: Hooks | None = None,
    sends: Sends | None = None,
    results: Mapping[fx.Node, Callable[[Any], Any]] | None = None,
    views: Mapping[fx.Node, Sequence[fx.Node]] | None = None,
    compiled: Compiled | None = None,
    once: Mapping[fx.Node, Any] | None = None,
) -> Generated:
    """Compile the program's graph to Python.

    `bind(node)` gives the callable for a call_function node;
    `results[node]` gets what the node has computed, and gives the value that the graph goes on with;
    `views[node]` are nodes that get no statement: the callable for `node` returns its value and theirs;
    `once[node]` is the value of a node that is computed once and needed by others.
    A region of which `compiled` has the function is one statement.
    """
    return Generator(
        program, bind, hooks or {}, sends or {}, results or {}, views or {}, compiled or {}, once or {}
    ).run()


class Generator:
    """Writes the functions of one program. The arguments are those of `generate`."""

    def __init__(
        self,
        program: Program,
        bind: Callable[[fx.Node], Any],
        hooks: Hooks,
        sends: Sends,
        results: Mapping[fx.Node, Callable[[Any], Any]],
        views: Mapping[fx.Node, Sequence[fx.Node]],
        compiled: Compiled,
        once: Mapping[fx.Node, Any],
    ) -> None:
        self.program = program
        self.bind = bind
        self.hooks = hooks
        self.sends = sends
        self.results = results
        self.views = views
        self.compiled = compiled
        regions = [region for region in regions_of(program) if region.number in compiled] if compiled else []
        self.ends = {region.nodes[-1]: region for region in regions}
        """The last node of each compiled region, in whose place the region runs."""
        self.end_of = {node: end for end, region in self.ends.items() for node in region.nodes}
        self.handed_on: dict[fx.Node, tuple[int, str]] = {}
        self.nodes = list(program.graph.nodes)
        self.once = dict.fromkeys(node for node in self.nodes if info(node).once)
        self.views_before = dict.fromkeys(view for made in views.values() for view in made)
        self.variable = {node: f"{'once_' if node in self.once else 'v'}{i}" for i, node in enumerate(self.nodes)}
        self.namespace: dict[str, Any] = {"inf": float("inf"), "nan": float("nan")}
        self.namespace.update({self.variable[node]: value for node, value in once.items()})
        self.functions: dict[Any, str] = {}
        self.lines: list[str] = []
        self.node_of_line: dict[int, fx.Node] = {}
        self.last_use: dict[fx.Node, fx.Node] = {}
        place = {node: i for i, node in enumerate(self.nodes)}
        # A view may stand between the nodes of a region: its use of a value comes before that of the region.
        for node in sorted(self.nodes, key=lambda node: place[self.end_of.get(node, node)]):
            for value in () if node in self.views_before or node in self.once else self._given_to(node):
                self.last_use[value] = self.end_of.get(node, node)

    def run(self) -> Generated:
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        calls = [n for n in self.nodes if n.op in ("call_function", "get_attr") and n not in self.views_before]
        body = [node for node in calls if info(node).next_step is None]
        tail = _Tail([node for node in calls if info(node).next_step is not None], self.once)
        output = self.nodes[-1]
        cut = first_commit(self.program, body)
        produced, committed = body[:cut], body[cut:]
        needed_later = dict.fromkeys(v for node in (*committed, output) for v in node.all_input_nodes)
        available = dict.fromkeys((*placeholders, *self._with_views(produced)))
        live = [node for node in needed_later if node in available and node not in self.once]
        handed_on = f"({self.tuple([self.variable[n] for n in live])}, {tail.first_values(self.variable)})"
        self.function("produce", placeholders, produced, handed_on, keep=needed_later | dict.fromkeys(tail.given))
        results: Sequence[Any] = output.args[0]
        returned = self.tuple([self.literal(value) for value in results])
        self.function("commit", live, committed, returned, keep=dict.fromkeys(output.all_input_nodes))
        for number, nodes in enumerate(tail.parts):
            self._tail_part(number, nodes, tail)
        code = self.code("step")
        made = code.namespace
        parts = tuple(
            TailPart(_anchor(nodes[0]), made[f"tail_{number}"], is_wait(nodes[0]), tuple(nodes))
            for number, nodes in enumerate(tail.parts)
        )
        return Generated(code, made["produce"], made["commit"], parts)

    def code(self, what: str) -> Code:
        """The functions that have been written. what: the word for them in tracebacks."""
        return Code.of("\n".join(self.lines) + "\n", what, self.node_of_line, self.handed_on, self.namespace)

    def _with_views(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        return [each for node in nodes for each in (node, *self.views.get(node, ()))]

    def _tail_part(self, number: int, nodes: Sequence[fx.Node], tail: _Tail) -> None:
        """A function that reads values of the tail from a list, and leaves there what later parts need."""
        self.lines.append(f"def tail_{number}(values):")
        own = dict.fromkeys(nodes)
        for value in dict.fromkeys(v for node in nodes for v in self._given_to(node) if v not in own):
            self.lines.append(f"    {self.variable[value]} = values[{tail.place[value]}]")
        for node in nodes:
            self._statement(node)
        for node in nodes:
            if node in tail.place:
                self.lines.append(f"    values[{tail.place[node]}] = {self.variable[node]}")
        if is_wait(nodes[0]):
            return  # may run again, so it drops nothing
        for value in dict.fromkeys(v for node in nodes for v in (node, *node.all_input_nodes)):
            if value in tail.place and self.last_use.get(value) in own:
                self.lines.append(f"    values[{tail.place[value]}] = None")

    def function(
        self,
        name: str,
        given: Sequence[fx.Node],
        body: Sequence[fx.Node],
        returned: str,
        keep: Mapping[fx.Node, None],
        empties: bool = False,
    ) -> None:
        self.lines.append(f"def {name}(given):")
        if given:
            self.lines.append(f"    {self.tuple([self.variable[node] for node in given])} = given")
        self.lines.append("    given.clear()" if empties else "    given = None")
        for node in given:
            if node not in self.last_use:
                self.lines.append(f"    {self.variable[node]} = None")
        for node in body:
            if node in self.views_before:
                continue
            if node in self.end_of:
                if node in self.ends:
                    self._region(self.ends[node], keep)
                    self._send(node)
                continue
            self._statement(node)
            self._send(node)
            if node in self.once:
                continue
            # Assign None instead of `del`: one opcode cheaper for several names, and the same effect.
            dead = [v for v in self._given_to(node) if self.last_use[v] is node and v not in keep]
            if node not in self.last_use and not written_nodes(node):
                dead.append(node)
            if dead:
                self.lines.append(f"    {' = '.join(self.variable[v] for v in dead)} = None")
        self.lines.append(f"    return {returned}")

    def _send(self, node: fx.Node) -> None:
        for send, value in self.sends.get(node, ()):
            self.lines.append(f"    {self._name(send)}({self.variable[value]})")

    def _region(self, region: Region, keep: Mapping[fx.Node, None]) -> None:
        """One call. What nobody needs afterwards is given away, so that the region can drop it on its way."""
        for node in region.nodes:
            for hook in self.hooks.get(node, ()):
                self.lines.append(f"    {self._name(hook)}()")
        end = region.nodes[-1]
        self.lines.append(f"    given = [{', '.join(self.variable[value] for value in region.inputs)}]")
        dead = [value for value in region.inputs if self.last_use.get(value) is end and value not in keep]
        if dead:
            self.lines.append(f"    {' = '.join(self.variable[value] for value in dead)} = None")
        self.node_of_line[len(self.lines) + 1] = end
        results = self.tuple([self.variable[value] for value in region.outputs])
        self.lines.append(f"    {results} = {self._name(self.compiled[region.number])}(given)")

    def _given_to(self, node: fx.Node) -> list[fx.Node]:
        """What a node gets from others in a step: not what was computed once, which is a global."""
        return [value for value in node.all_input_nodes if value not in self.once]

    def _statement(self, node: fx.Node) -> None:
        for hook in self.hooks.get(node, ()):
            self.lines.append(f"    {self._name(hook)}()")
        if node in self.once:
            return
        self.node_of_line[len(self.lines) + 1] = node
        name = self.variable[node]
        if node.op == "get_attr":
            self.namespace[f"c_{name}"] = self.program.constants[str(node.target)]
            self.lines.append(f"    {name} = c_{name}")
            return
        if node.target is operator.getitem:
            self.lines.append(f"    {name} = {self.literal(node.args[0])}[{self.literal(node.args[1])}]")
            return
        arguments = [self.literal(value) for value in node.args]
        arguments.extend(f"{key}={self.literal(value)}" for key, value in node.kwargs.items())
        self.lines.append(f"    {name} = {self._callee(node)}({', '.join(arguments)})")
        if node in self.views:
            names = [self.variable[each] for each in self._with_views([node])]
            self.lines[-1] = f"    {self.tuple(names)} = {self._callee(node)}()"
        for each in self._with_views([node]):
            if each in self.results:
                name, function = self.variable[each], self._name(self.results[each])
                self.lines.append(f"    {name} = {function}({name})")
                self.handed_on[each] = len(self.lines), function

    def _callee(self, node: fx.Node) -> str:
        function = self.bind(node)
        key = function if isinstance(function, torch._ops.OpOverload) else id(function)
        if key not in self.functions:
            name = f"f{len(self.functions)}"
            self.functions[key] = name
            self.namespace[name] = bound(function)
        return self.functions[key]

    def literal(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.variable[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self.literal(item) for item in value)}]"
        if value is None or isinstance(value, (bool, int, float, str)):
            return repr(value)
        return self._name(value)

    def _name(self, value: Any) -> str:
        """A name of its own for a value that has no literal."""
        name = f"k{len(self.namespace)}"
        self.namespace[name] = value
        return name

    @staticmethod
    def tuple(items: Sequence[str]) -> str:
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


class _Tail:
    """The nodes that run in the following step, cut into parts, and the places of their values in a list.

    A part ends where the anchor changes, and where waits begin or end. Ctrl-C may interrupt a part of waits, which then
    runs again. It must not interrupt any other part, since an update must not run twice.
    """

    def __init__(self, nodes: Sequence[fx.Node], once: Mapping[fx.Node, None]) -> None:
        self.parts: list[list[fx.Node]] = []
        for node in nodes:
            last = self.parts[-1] if self.parts else None
            if last is None or _anchor(last[0]) is not _anchor(node) or is_wait(last[-1]) != is_wait(node):
                self.parts.append([node])
            else:
                last.append(node)
        part_of = {node: i for i, part in enumerate(self.parts) for node in part}
        taken = (v for node in nodes for v in node.all_input_nodes if v not in part_of and v not in once)
        self.given = list(dict.fromkeys(taken))
        passed_on = [n for n in nodes if any(part_of.get(user) != part_of[n] for user in n.users)]
        made = [node for node in passed_on if not is_wait(node)]
        self.place = {node: i for i, node in enumerate((*self.given, *made))}
        self.size = len(self.place)
        for node in passed_on:
            if is_wait(node):  # yields the tensor that it was given
                self.place[node] = self.place[node.all_input_nodes[0]]

    def first_values(self, variable: Mapping[fx.Node, str]) -> str:
        empty = ["None"] * (self.size - len(self.given))
        return f"[{', '.join([variable[node] for node in self.given] + empty)}]"


def _anchor(node: fx.Node) -> fx.Node:
    anchor = info(node).next_step
    assert anchor is not None
    return anchor


def first_commit(program: Program, body: Sequence[fx.Node]) -> int:
    """Index of the first node that changes an input of the step: parameters, buffers or optimizer state.

    body: the calls of the program, in order, or some of them.
    """
    roots = Roots(program.graph, program.aliases())
    for i, node in enumerate(body):
        if info(node).phase != "update":
            continue
        if is_opaque(node) or any(roots[value].op == "placeholder" for value in written_nodes(node)):
            return i
    return len(body)
