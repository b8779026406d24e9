"""Reads a program from its canonical text, or from ten lines that somebody has written in its form.

A text is data: ops are looked up by name among those that graphs may call. What a text does not say is filled in: see
`text_facts`.

Why: docs/decisions.md, "Text, not objects, is what is compared".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from commfuse_fx.errors import ConfigTypeError, ConfigValueError, VerificationError
from commfuse_fx.ir.core.declared_specs import computed_spec
from commfuse_fx.ir.core.functions import hand_over
from commfuse_fx.ir.core.halves import gradient_specs
from commfuse_fx.ir.core.meta import NodeInfo, Spec, TensorSpec, info, set_info
from commfuse_fx.ir.core.naming import Names
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.verify import verify
from commfuse_fx.ir.ops.known_ops import find_target
from commfuse_fx.ir.text.text_facts import fill_in
from commfuse_fx.ir.text.text_header import read_header
from commfuse_fx.ir.text.text_lines import (
    RETURN,
    TextLine,
    UnknownReference,
    argument_tokens,
    split_header,
    split_lines,
)
from commfuse_fx.ir.text.text_remarks import RemarkReader
from commfuse_fx.ir.text.text_values import Unfinished, read_call, read_spec
from commfuse_fx.machine.source import Costs, resolve_costs
from commfuse_fx.support.checks import show

_FORM = "write it as Lowered.text() does, for example `fwd %a: f32[2] = aten.relu(%x)`"


def parse_program(
    text: str,
    *,
    gradients: Sequence[str] | None = None,
    flags: Mapping[str, bool] | None = None,
    constants: Mapping[str, torch.Tensor] | None = None,
    cluster: Any = None,
    device: str = "cpu",
) -> Program:
    """Read the program whose canonical text this is. Its own text is the same again.

    What a text does not say is chosen. Strides that are not written are contiguous. Parameters of a floating
    dtype are trainable, and are numbered in their order. Parameters are whole, not parts that a division has
    left on a rank. The returned values behind the loss are gradients of the parameters, in their order.

    text: as `Lowered.text()` writes it. Empty lines and indentation do not count. Lines of the header may be
        left out: two ranks along `dp`, a training step and default options are meant then.
    gradients: the parameters whose gradients are returned, where shapes do not tell.
    flags: those of the optimizer that are not False, such as {"momentum": True}, where no update in the text
        shows them.
    constants: values by the name of the node; the others have none.
    cluster: prices, where the header names no preset: what `compile` takes as `cluster`.
    device: of all tensors.

    Raises ConfigValueError, which names the line and what to write instead; ConfigTypeError for an argument of
    another type.
    """
    given = (
        ("text", text, str, "a str"),
        ("gradients", gradients, (list, tuple), "a list of names such as ['w']"),
        ("flags", flags, Mapping, 'a dict such as {"momentum": True}'),
        ("constants", constants, Mapping, "a dict of tensors by the name of the node"),
        ("device", device, str, 'a str such as "cpu"'),
    )
    for name, value, kind, what in given:
        if value is not None and not isinstance(value, kind):
            raise ConfigTypeError(f"parse_program: {name} is {show(value)}; give {what}")
    costs = None if cluster is None else resolve_costs(cluster, "parse_program: cluster")
    return _Parser(text, dict(constants or {}), costs, device).parse(gradients, dict(flags or {}))


class _Parser:
    def __init__(self, text: str, constants: Mapping[str, torch.Tensor], cluster: Costs | None, device: str) -> None:
        self.cluster = cluster
        self.device = device
        self.values = constants
        self.written = {number: line.strip() for number, line in enumerate(text.split("\n"), 1)}
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.lines: dict[fx.Node, TextLine] = {}
        self.constants: dict[str, torch.Tensor] = {}

    def parse(self, gradients: Sequence[str] | None, flags: Mapping[str, bool]) -> Program:
        numbered = [(number, line) for number, line in self.written.items() if line]
        values, body = split_header(numbered, self.error)
        try:
            header = read_header(values, self.cluster)
        except ValueError as problem:
            raise self.error(1, f"in the header, {problem}", "correct the header") from None
        *lines, last = split_lines(body, self.error)
        for line in lines:
            self.nodes[line.name] = self.made(line)
        remarks = RemarkReader(header.mesh, self.nodes, self.error)
        for node, line in self.lines.items():
            remarks.read(node, line)
        program = Program(
            graph=self.graph,
            mesh=header.mesh,
            config=header.config,
            params={},
            sources={},
            training=header.training,
            loss=self.output(last),
            constants=self.constants,
            names=Names.restored({}, self.nodes),
            torch_version=header.torch_version,
        )
        unknown = next((name for name in self.values if name not in self.nodes or not self.is_constant(name)), None)
        if unknown is not None:
            what = f"constants= has {show(unknown)}, and no constant of the text has this name"
            raise self.error(last.number, what, "give values for constants only")
        try:
            self.name_aux(program, header.aux, last)
            fill_in(program, self.lines, header.optimizer, flags, gradients, self.error)
            self.finish_specs()
            verify(program, "reading")
        except VerificationError as error:
            raise self.broken(str(error).removeprefix("after pass reading: ")) from None
        except ConfigValueError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, AssertionError) as error:
            raise self.broken(f"the lines contradict each other ({type(error).__name__}: {error})"[:300]) from error
        return program

    def error(self, number: int, problem: str, fix: str = _FORM) -> ConfigValueError:
        line = self.written.get(number, "")
        return ConfigValueError(f"text of a program, line {number}: {problem}; {fix}; the line is {line[:200]!r}")

    def made(self, line: TextLine) -> fx.Node:
        try:
            spec = read_spec(line.value, self.device)
            if line.phase != "input":
                node = self.call(line)
            elif line.op == "constant":
                node = self.constant(line)
            else:
                node = self.graph.placeholder(f"input_{len(self.nodes)}")
        except UnknownReference as unknown:
            problem = f"it refers to %{str(unknown)[:80]}, and no line before it has this name"
            raise self.error(line.number, problem, "name one that has") from None
        except (ValueError, LookupError) as wrong:
            raise self.error(line.number, str(wrong)) from None
        set_info(node, NodeInfo(line.phase, spec, _module(line.name), line.name))
        self.lines[node] = line
        return node

    def call(self, line: TextLine) -> fx.Node:
        try:
            target = find_target(line.op)
        except LookupError as problem:
            raise ValueError(f"{line.op[:80]!r} cannot be called: {problem}") from None
        args, kwargs = read_call(target, line.arguments, self.nodes)
        node = self.graph.call_function(target)
        node.args, node.kwargs = args, kwargs
        return node

    def constant(self, line: TextLine) -> fx.Node:
        spec = read_spec(line.value, "meta")
        value = self.values.get(line.name)
        if value is None:
            shape, stride, dtype = getattr(spec, "shape", ()), getattr(spec, "stride", ()), getattr(spec, "dtype", None)
            value = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        name = f"_constant_{len(self.constants)}"
        self.constants[name] = value
        return self.graph.create_node("get_attr", name)

    def is_constant(self, name: str) -> bool:
        return self.nodes[name].op == "get_attr"

    def output(self, line: TextLine) -> fx.Node:
        """Writes the graph's output, and returns the loss."""
        try:
            tokens = list(argument_tokens(line.arguments, self.nodes))
        except UnknownReference as unknown:
            problem = f"it returns %{str(unknown)[:80]}, and no line has this name"
            raise self.error(line.number, problem, "name one that has") from None
        except ValueError as problem:
            raise self.error(line.number, str(problem)) from None
        found = [self.nodes[token[1:]] for token in tokens if token.startswith("%")]
        if not found or "".join(tokens) != f"[{', '.join(f'%{info(node).name}' for node in found)}]":
            fix = "write `return [%loss, %gradient]`, the loss first"
            raise self.error(line.number, "it does not return a list of nodes", fix)
        node = self.graph.output(tuple(found))
        set_info(node, NodeInfo("update", name=""))
        return found[0]

    def name_aux(self, program: Program, names: Sequence[str], line: TextLine) -> None:
        """The last of the nodes that the graph returns are no gradients."""
        returned: Any = program.output.args[0]
        if len(names) >= len(returned):
            problem = f"the header names {len(names)} values behind the gradients, and {len(returned)} are returned"
            raise self.error(line.number, problem, "return the loss, the gradients, and these")
        program.aux = dict(zip(names, returned[len(returned) - len(names) :], strict=True))

    def finish_specs(self) -> None:
        """Specs of which the text has only the first: what the op makes of its operands."""
        for node, line in self.lines.items():
            spec = info(node).spec
            if not isinstance(spec, Unfinished):
                continue
            try:
                made: Any = computed_spec(node) if isinstance(node.target, torch._ops.OpOverload) else None
                if node.target is hand_over:
                    made = gradient_specs(node.all_input_nodes)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise self.error(line.number, f"the op refuses its operands: {error}"[:300]) from None
            if not isinstance(made, tuple) or len(made) != spec.total:
                problem = f"it yields {spec.total} tensors, of which only the first are written"
                raise self.error(line.number, problem, "write all of them")
            info(node).spec = (*spec, *(_on(self.device, each) for each in made[len(spec) :]))

    def broken(self, problem: str) -> ConfigValueError:
        """The error for a program that verification refuses; the problem may begin with the name of a node."""
        name = problem.removeprefix("node ").partition(": ")[0]
        line = self.lines[self.nodes[name]].number if name in self.nodes else max(self.written)
        return self.error(line, problem, "correct the text")


def _on(device: str, spec: Spec) -> Spec:
    return replace(spec, device=device) if isinstance(spec, TensorSpec) else spec


def _module(name: str) -> str:
    """The module of a node: what stands before the first slash of its name, unless a pass has made that."""
    module, slash, _ = name.partition("/")
    made = ("reduce", "rows", "buffers", "slice", "axis_index", "shard", "update", "bucket", RETURN)
    return module if slash and module.partition(".")[0] not in made else ""
