"""Generate Python for a scheduled graph.

One statement per node, ops bound to locals of the module so that a call costs one dictionary look-up,
and every value dropped after its last use. Two functions come out: `produce` runs everything that can
fail, `commit` everything that changes what the user owns.
"""

from __future__ import annotations

import linecache
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.dependence import is_opaque, written_nodes
from commfuse_fx.ir.meta import info
from commfuse_fx.ir.program import Program

_serial = count()


@dataclass(frozen=True)
class Generated:
    """`produce(inputs) -> live values`, `commit(live values) -> outputs`, and the node of each source line."""

    produce: Callable[[list[Any]], tuple[Any, ...]]
    commit: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    source: str
    filename: str
    node_of_line: Mapping[int, fx.Node]


def generate(
    program: Program,
    bind: Callable[[fx.Node], Any],
    hooks: Mapping[fx.Node, Sequence[Callable[[], None]]] | None = None,
    sends: Mapping[fx.Node, Sequence[tuple[Callable[[Any], None], fx.Node]]] | None = None,
) -> Generated:
    """Compile the program's graph to Python.

    `bind(node)` gives the callable for a call_function node; `hooks[node]` are called just before it;
    `sends[node]` are pairs of a function and the node whose value it gets, called just after it.
    """
    return _Generator(program, bind, hooks or {}, sends or {}).run()


class _Generator:
    def __init__(
        self,
        program: Program,
        bind: Callable[[fx.Node], Any],
        hooks: Mapping[fx.Node, Sequence[Callable[[], None]]],
        sends: Mapping[fx.Node, Sequence[tuple[Callable[[Any], None], fx.Node]]],
    ) -> None:
        self.program = program
        self.bind = bind
        self.hooks = hooks
        self.sends = sends
        self.nodes = list(program.graph.nodes)
        self.variable = {node: f"v{i}" for i, node in enumerate(self.nodes)}
        self.namespace: dict[str, Any] = {"inf": float("inf"), "nan": float("nan")}
        self.functions: dict[Any, str] = {}
        self.lines: list[str] = []
        self.node_of_line: dict[int, fx.Node] = {}
        self.last_use: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            for value in node.all_input_nodes:
                self.last_use[value] = node

    def run(self) -> Generated:
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        body = [node for node in self.nodes if node.op in ("call_function", "get_attr")]
        output = self.nodes[-1]
        cut = first_commit(body)
        produced, committed = body[:cut], body[cut:]
        needed_later = dict.fromkeys(v for node in (*committed, output) for v in node.all_input_nodes)
        made_before = dict.fromkeys((*placeholders, *produced))
        live = [node for node in needed_later if node in made_before]
        self._function("produce", placeholders, produced, live, keep=needed_later)
        results: Sequence[Any] = output.args[0]
        self._function("commit", live, committed, results, keep=dict.fromkeys(output.all_input_nodes))
        source = "\n".join(self.lines) + "\n"
        filename = f"<commfuse step {next(_serial)}>"
        exec(compile(source, filename, "exec"), self.namespace)
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        return Generated(self.namespace["produce"], self.namespace["commit"], source, filename, self.node_of_line)

    def _function(
        self,
        name: str,
        given: Sequence[fx.Node],
        body: Sequence[fx.Node],
        results: Sequence[Any],
        keep: Mapping[fx.Node, None],
    ) -> None:
        self.lines.append(f"def {name}(given):")
        if given:
            self.lines.append(f"    {self._tuple([self.variable[node] for node in given])} = given")
        self.lines.append("    given = None")
        for node in given:
            if node not in self.last_use:
                self.lines.append(f"    {self.variable[node]} = None")
        for node in body:
            self._statement(node)
            for send, value in self.sends.get(node, ()):
                self.lines.append(f"    {self._name(send)}({self.variable[value]})")
            # Assign None instead of `del`: one opcode cheaper for several names, and the same effect.
            dead = [v for v in node.all_input_nodes if self.last_use[v] is node and v not in keep]
            if node not in self.last_use and not written_nodes(node):
                dead.append(node)
            if dead:
                self.lines.append(f"    {' = '.join(self.variable[v] for v in dead)} = None")
        self.lines.append(f"    return {self._tuple([self._literal(value) for value in results])}")

    def _statement(self, node: fx.Node) -> None:
        for hook in self.hooks.get(node, ()):
            self.lines.append(f"    {self._name(hook)}()")
        self.node_of_line[len(self.lines) + 1] = node
        name = self.variable[node]
        if node.op == "get_attr":
            self.namespace[f"c_{name}"] = self.program.constants[str(node.target)]
            self.lines.append(f"    {name} = c_{name}")
            return
        if node.target is operator.getitem:
            self.lines.append(f"    {name} = {self._literal(node.args[0])}[{self._literal(node.args[1])}]")
            return
        arguments = [self._literal(value) for value in node.args]
        arguments.extend(f"{key}={self._literal(value)}" for key, value in node.kwargs.items())
        self.lines.append(f"    {name} = {self._callee(node)}({', '.join(arguments)})")

    def _callee(self, node: fx.Node) -> str:
        function = self.bind(node)
        key = function if isinstance(function, torch._ops.OpOverload) else id(function)
        if key not in self.functions:
            name = f"f{len(self.functions)}"
            self.functions[key] = name
            # The overload's own callable skips a Python frame per call.
            self.namespace[name] = function._op if isinstance(function, torch._ops.OpOverload) else function
        return self.functions[key]

    def _literal(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.variable[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._literal(item) for item in value)}]"
        if value is None or isinstance(value, (bool, int, float, str)):
            return repr(value)
        return self._name(value)

    def _name(self, value: Any) -> str:
        """A name of its own for a value that has no literal."""
        name = f"k{len(self.namespace)}"
        self.namespace[name] = value
        return name

    @staticmethod
    def _tuple(items: Sequence[str]) -> str:
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def first_commit(body: Sequence[fx.Node]) -> int:
    """Index of the first node that changes an input of the step: parameters, buffers or optimizer state."""
    for i, node in enumerate(body):
        if info(node).phase == "update" and (written_nodes(node) or is_opaque(node)):
            return i
    return len(body)
