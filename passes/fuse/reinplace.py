"""Let ops overwrite an input that nobody needs any more, as eager programs do: less memory, fewer cache misses.

Runs after scheduling, because who needs what later depends on the order.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.collectives import IN_PLACE, is_wait, memory_on_wire
from commfuse_fx.ir.core.dependence import Roots, is_view
from commfuse_fx.ir.core.halves import lasting
from commfuse_fx.ir.core.meta import Spec, TensorSpec, info
from commfuse_fx.ir.core.program import Program
from commfuse_fx.kernels.masks import bernoulli, bernoulli_
from commfuse_fx.passes.declaration import Pass

aten = torch.ops.aten

_SPLITS = (aten.split_with_sizes.default, aten.split.Tensor)

_IN_PLACE: dict[Any, Any] = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.add.Scalar: aten.add_.Scalar,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.mul.Scalar: aten.mul_.Tensor,  # mul_.Scalar first rounds the number to the tensor's dtype, mul.Scalar does not
    aten.div.Tensor: aten.div_.Tensor,
    aten.div.Scalar: aten.div_.Scalar,
    aten.neg.default: aten.neg_.default,
    aten.relu.default: aten.relu_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.gelu.default: aten.gelu_.default,
    aten.silu.default: aten.silu_.default,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.masked_fill.Tensor: aten.masked_fill_.Tensor,
    aten.bernoulli.p: aten.bernoulli_.float,
    bernoulli: bernoulli_,
    **IN_PLACE,
}
"""Op -> its variant that overwrites its first argument."""


@dataclass(frozen=True)
class _Into:
    """The variant of an op that writes into memory which it is given, and may be an input's.

    argument: what the variant calls that memory.
    inputs: the positions of the inputs that may lie there.
    along: the position of the dimension along which the op sums up; None for an op that works element by element.
    """

    target: Any
    argument: str = "grad_input"
    inputs: tuple[int, ...] = (0, 1)
    along: int | None = None


_INTO: dict[Any, _Into] = {
    aten.threshold_backward.default: _Into(aten.threshold_backward.grad_input),
    aten.gelu_backward.default: _Into(aten.gelu_backward.grad_input),
    aten.silu_backward.default: _Into(aten.silu_backward.grad_input),
    aten.tanh_backward.default: _Into(aten.tanh_backward.grad_input),
    aten.sigmoid_backward.default: _Into(aten.sigmoid_backward.grad_input),
    aten.hardtanh_backward.default: _Into(aten.hardtanh_backward.grad_input),
    aten.leaky_relu_backward.default: _Into(aten.leaky_relu_backward.grad_input),
    aten.elu_backward.default: _Into(aten.elu_backward.grad_input, inputs=(0, 5)),
    aten.where.self: _Into(aten.where.self_out, "out", inputs=(1, 2)),
    aten._softmax.default: _Into(aten._softmax.out, "out", inputs=(0,), along=1),
    aten._log_softmax.default: _Into(aten._log_softmax.out, "out", inputs=(0,), along=1),
    aten._softmax_backward_data.default: _Into(aten._softmax_backward_data.out, along=2),
    aten._log_softmax_backward_data.default: _Into(aten._log_softmax_backward_data.out, "out", along=2),
}
"""The softmax ops read all of a row before they write its elements, each where it was read: so do the kernels for the
last dimension on CPU and on CUDA."""


@dataclass(frozen=True)
class Reinplace(Pass):
    """Bitwise neutral: the in-place variant computes the same."""

    name = "reinplace"
    numerics = "bitwise"
    requires = ("averaged",)

    def __call__(self, program: Program) -> bool:
        return reinplace(program, Roots(program.graph, program.aliases()))


def reinplace(program: Program, roots: Roots) -> bool:
    """The pass, for a caller that knows the program's roots. Returns whether anything changed."""
    uses = _Uses(roots)
    candidates: list[tuple[int, fx.Node]] = []
    for i, node in enumerate(program.graph.nodes):
        uses.meet(node)
        for value in node.all_input_nodes if not is_view(node) else ():
            uses.add(value, i)
        if is_wait(node) and (sent := memory_on_wire(node)) is not None:
            uses.add(sent, i)
        if node.op != "call_function" or info(node).once or info(node).region is not None:
            continue
        if node.target in _IN_PLACE or node.target in _INTO:
            candidates.append((i, node))
    for value in lasting(program):
        uses.add(value, len(program.graph.nodes))
    modified = False

    def is_free(node: fx.Node, operand: fx.Node, position: int) -> bool:
        place = uses.place_of(operand)
        if uses.is_needed_after(position, operand) or not _may_overwrite(node, operand, place.root):
            return False
        if node.target in IN_PLACE and place.split is not None:
            return False  # while a part is on the wire, nobody touches memory of the others
        return not any(uses.overlap(other, operand) for other in node.all_input_nodes if other is not operand)

    for position, node in candidates:
        operand = next((each for each in _operands(node) if is_free(node, each, position)), None)
        if operand is None:
            continue
        _write_into(node, operand)
        uses.hand_on(operand, node)
        modified = True
    return modified


@dataclass(frozen=True)
class _Place:
    """Where a value lies: in the memory of a node, or in one of the parts into which a node splits that."""

    root: fx.Node
    split: fx.Node | None = None
    part: fx.Node | None = None

    def around(self, inner: _Place) -> _Place:
        """Where something lies whose place in a value is `inner`, if this is the place of that value."""
        return self if self.split is not None else _Place(self.root, inner.split, inner.part)


class _Uses:
    """Up to which position something is needed of each piece of memory.

    Parts of one split have no element in common. So one may be overwritten while others are still needed.
    """

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._places: dict[fx.Node, _Place] = {}  # of values in parts
        self._handed_on: dict[fx.Node, _Place] = {}  # root of the result of an in-place op -> where that lies
        self._last: dict[fx.Node, dict[_Place, int]] = {}  # root -> place in it -> last use
        self._last_of_splits: dict[fx.Node, dict[fx.Node | None, int]] = {}  # root -> split -> of any of its parts

    def meet(self, node: fx.Node) -> None:
        """The next node of the graph: a view of a part lies in this part."""
        if not is_view(node) or not node.all_input_nodes:
            return
        base = node.all_input_nodes[0]
        if base in self._places:
            self._places[node] = self._places[base]
        elif node.target is operator.getitem and base.target in _SPLITS and _is_dense(base.all_input_nodes[0]):
            self._places[node] = _Place(self._roots[node], base, node)

    def place_of(self, value: fx.Node) -> _Place:
        place = self._places.get(value) or _Place(self._roots[value])
        while place.root in self._handed_on:
            place = self._handed_on[place.root].around(place)
        return place

    def add(self, value: fx.Node, position: int) -> None:
        """Something needs this value there."""
        self._add(self.place_of(value), position)

    def _add(self, place: _Place, position: int) -> None:
        last, of_splits = self._last.setdefault(place.root, {}), self._last_of_splits.setdefault(place.root, {})
        last[place] = max(last.get(place, -1), position)
        of_splits[place.split] = max(of_splits.get(place.split, -1), position)

    def is_needed_after(self, position: int, value: fx.Node) -> bool:
        """Whether an element of this value's memory is needed later than there."""
        place = self.place_of(value)
        last, of_splits = self._last.get(place.root, {}), self._last_of_splits.get(place.root, {})
        if place.split is None:
            return max(of_splits.values(), default=-1) > position
        return last.get(place, -1) > position or any(
            at > position for split, at in of_splits.items() if split is not place.split
        )

    def overlap(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether two values may have an element in common."""
        first, second = self.place_of(one), self.place_of(other)
        return first.root is second.root and (
            first.split is None or first.split is not second.split or first.part is second.part
        )

    def hand_on(self, operand: fx.Node, result: fx.Node) -> None:
        """The result of an op lies in the memory of its operand from now on, with all that needs it."""
        place, own = self.place_of(operand), self.place_of(result).root
        if own is place.root:
            return
        self._handed_on[own] = place
        self._last_of_splits.pop(own, None)
        for inner, position in self._last.pop(own, {}).items():
            self._add(place.around(inner), position)


def _is_dense(node: fx.Node) -> bool:
    """Whether no two elements of a value lie in one place."""
    spec = info(node).spec
    return isinstance(spec, TensorSpec) and spec.is_dense


def _operands(node: fx.Node) -> list[fx.Node]:
    """The inputs that a variant of the op may overwrite, in the order in which they are tried."""
    into = _INTO.get(node.target)
    if into is None:
        places: tuple[int, ...] = (0,)
    elif into.along is None or _is_last(node.args[into.along], info(node).spec):
        places = into.inputs
    else:
        places = ()
    values = [node.args[place] for place in places if place < len(node.args)]
    return [value for value in values if isinstance(value, fx.Node)]


def _is_last(dimension: Any, spec: Spec) -> bool:
    """Whether rows along the dimension lie one behind the other, each without gaps."""
    if not isinstance(spec, TensorSpec) or not isinstance(dimension, int) or not spec.shape:
        return False
    return dimension % len(spec.shape) == len(spec.shape) - 1 and spec.is_contiguous


def _write_into(node: fx.Node, operand: fx.Node) -> None:
    into = _INTO.get(node.target)
    if into is None:
        node.target = _IN_PLACE[node.target]
    else:
        node.target = into.target
        node.kwargs = {**node.kwargs, into.argument: operand}


def _may_overwrite(node: fx.Node, operand: fx.Node, root: fx.Node) -> bool:
    """The operand is all of a block of memory that the step made itself, and the result has the same layout."""
    have, want = info(operand).spec, info(node).spec
    if not isinstance(have, TensorSpec) or have != want or not have.is_dense:
        return False
    return root.op == "call_function" and not info(root).once
