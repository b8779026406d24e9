"""What a graph computes from shapes and constants alone, such as masks, is the same in every step.

Why: docs/decisions.md, "What no step changes is computed once, up to 64 MiB".
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.dependence import Roots, is_opaque, written_nodes
from commfuse_fx.ir.core.halves import outputs_of
from commfuse_fx.ir.core.meta import Spec, TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.random_draws import can_draw
from commfuse_fx.ir.ops.unwritten import is_unwritten

aten = torch.ops.aten

SHAPE_ONLY = (
    aten.full_like.default,
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.ones_like.default,
    aten.zeros_like.default,
)
"""Ops that ask their first argument for nothing but its shape, strides, dtype and device."""

_LIFTS = (aten.lift_fresh_copy.default, aten.lift_fresh.default)


def fixed_nodes(program: Program) -> dict[fx.Node, None]:
    """The nodes that have the same value in every run of this graph, in the order of the graph.

    They depend on nothing but shapes and constants. Nobody writes to their memory, and nobody gets it: neither the
    caller nor a function whose effects are unknown. A constant counts where the trace has made it, as for
    `torch.tensor(2.0)`; any other one is a tensor of the user's, who may write to it between two steps.
    """
    roots = Roots(program.graph, program.aliases())
    seen = dict.fromkeys(roots[node] for node in written_or_handed_out(program))
    found: dict[fx.Node, None] = {}
    for node in program.graph.nodes:
        if roots[node] not in seen and (_is_own_constant(node) or _is_pure(node)):
            inputs = node.all_input_nodes[1:] if node.target in SHAPE_ONLY else node.all_input_nodes
            if all(value in found for value in inputs):
                found[node] = None
    return found


def written_or_handed_out(program: Program) -> list[fx.Node]:
    """Values whose memory a node writes to, or that others get: the caller, or a function of unknown effects.

    An op that makes such a value among several results belongs to them.
    """
    seen = list(program.output.all_input_nodes)
    if program.has_two_halves:
        seen.extend(outputs_of(program))
    for node in program.graph.nodes:
        seen.extend(node.all_input_nodes if is_opaque(node) else written_nodes(node))
    makers = [value for node in seen if node.target is operator.getitem for value in node.all_input_nodes]
    return [*seen, *makers]


def _is_own_constant(node: fx.Node) -> bool:
    return node.op == "get_attr" and all(user.target in _LIFTS for user in node.users)


def _is_pure(node: fx.Node) -> bool:
    if node.op != "call_function" or info(node).phase == "update" or not _is_tensors(info(node).spec):
        return False
    if node.target is operator.getitem:
        return True
    known = getattr(node.target, "namespace", "") in ("aten", "prims")
    return known and not (can_draw(node.target) or written_nodes(node) or is_unwritten(node))


def _is_tensors(spec: Spec) -> bool:
    return isinstance(spec, TensorSpec) or (isinstance(spec, tuple) and all(map(_is_tensors, spec)))


def held_values(program: Program) -> list[fx.Node]:
    """Of the nodes that are computed once, those whose value a node needs that runs in every step, in graph order."""
    needed = dict.fromkeys(
        value for node in program.graph.nodes if not info(node).once for value in node.all_input_nodes
    )
    return [node for node in program.graph.nodes if info(node).once and node in needed]


class FixedValues:
    """The values of a program's fixed nodes. Each is computed when somebody asks for it, and then remembered.

    nodes: the fixed nodes, in the order of the graph.
    """

    def __init__(
        self,
        program: Program,
        device: str | None = None,
        at_most: int | None = None,
        finish: Callable[[Any, Spec], Any] = lambda value, spec: value,
    ) -> None:
        """
        program: the program, whose graph must not change while values are asked for.
        device: where to compute. None: where the graph says.
        at_most: bytes of a tensor that is still computed. None: any.
        finish: gets what an op has made and the spec of its node, and gives the value to go on with.
        """
        self.nodes = fixed_nodes(program)
        self._constants = program.constants
        self._device = device
        self._at_most = at_most
        self._finish = finish
        self._values: dict[fx.Node, Any] = {}

    def of(self, node: fx.Node) -> Any:
        """The value of a node: a tensor, or a list or tuple of them. Nobody may write to it.

        None where it has none: the node is not fixed, or needs a tensor above `at_most`, or a constant whose value is
        not known, as in a program that was read from a file.
        """
        if node not in self.nodes:
            return None
        pending = [node]  # a chain of ops may be deeper than Python's stack
        with torch.no_grad(), torch._C._DisableAutocast():
            while pending:
                missing = [value for value in self._inputs(pending[-1]) if value not in self._values]
                if missing:
                    pending.extend(missing)
                else:
                    last = pending.pop()
                    if last not in self._values:
                        self._values[last] = self._compute(last)
        return self._values[node]

    def forget(self, node: fx.Node) -> None:
        """Free a value that nobody needs any more. Who asks for it again has it computed again."""
        self._values.pop(node, None)

    def _inputs(self, node: fx.Node) -> Sequence[fx.Node]:
        return node.all_input_nodes[1:] if node.target in SHAPE_ONLY else node.all_input_nodes

    def _compute(self, node: fx.Node) -> Any:
        if self._at_most is not None and _largest(info(node).spec) > self._at_most:
            return None
        if node.op == "get_attr":
            constant = self._constants[str(node.target)]
            return None if constant.is_meta else constant.to(self._device or constant.device)
        if any(self._values[value] is None for value in self._inputs(node)):
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._value)
        if self._device is not None:
            kwargs = {key: self._device if isinstance(v, torch.device) else v for key, v in kwargs.items()}
        if node.target in SHAPE_ONLY:
            kwargs = {"device": self._device or tensor_spec(node).device, **kwargs}
        assert callable(node.target)
        return self._finish(node.target(*args, **kwargs), info(node).spec)

    def _value(self, node: fx.Node) -> Any:
        """What an op gets for one of its arguments: where it only looks at the shape, a tensor without memory."""
        return self._values[node] if node in self._values else tensor_spec(node).empty("meta")


def _largest(spec: Spec) -> int:
    if isinstance(spec, TensorSpec):
        return spec.nbytes
    return max(map(_largest, spec or ()), default=0)
