"""Cut the compute between collectives into regions, each of which torch's Inductor compiles into one function.

Why: docs/decisions.md, "Inductor compiles what lies between collectives, and the plan stays the authority".
Why: docs/decisions.md, "Half precision is rounded where a jump follows".
"""

from __future__ import annotations

import operator
from collections.abc import Container, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from commfuse_fx.cost.roofline import is_product
from commfuse_fx.ir.core.collectives import is_start, is_wait
from commfuse_fx.ir.core.dependence import Roots, is_opaque, is_view, written_nodes
from commfuse_fx.ir.core.halves import outputs_of
from commfuse_fx.ir.core.meta import TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.equal_nodes import equality_key
from commfuse_fx.kernels.continuous_ops import is_float, is_half, may_jump, numbers_read
from commfuse_fx.kernels.inductor_ops import LEFT_OUT, LEFT_OUT_ON_CPU, found_in_memory, is_computed_wrongly
from commfuse_fx.kernels.rounding import is_rounded_otherwise
from commfuse_fx.passes.declaration import Pass, Situation

aten = torch.ops.aten

_KNOWN = ("aten", "prims", "commfuse")
"""Namespaces of ops that Inductor has kernels for, and of those of this package. It would only call other ones, and
fail where their results have other strides than was said."""

_BY_LIBRARY = (aten.mm.out, aten.addmm.out, aten.bmm.out, aten.baddbmm.out)


@dataclass(frozen=True)
class InductorRegions(Pass):
    """An annotation. Starts and waits of collectives are in no region, and stay in their order.

    `at_least`: a region of fewer ops that compute runs op by op. So does one in which no two ops can share a kernel:
    a library computes products either way, and of what is left Inductor makes the kernels that PyTorch has.
    `by_layer`: regions also end where a layer does, such as `layers.3` of a list of modules. Layers that are alike are
    then compiled once, but nothing is fused across their borders.
    """

    name = "inductor_regions"
    numerics = "reordered"
    requires = ("averaged",)
    needs_sizes = True

    at_least: int = 2
    by_layer: bool = False

    @classmethod
    def when(cls, situation: Situation) -> InductorRegions | None:
        config = situation.config
        return cls(by_layer=config.inductor_regions == "layers") if config.backend == "inductor" else None

    def __call__(self, program: Program) -> bool:
        _join_results(program)
        roots = Roots(program.graph, program.aliases())
        decisive = _decisive(program, roots) if any(map(is_half, program.graph.nodes)) else {}
        regions: list[list[fx.Node]] = []
        unfused: list[list[fx.Node]] = []
        for found in _Cutter(program, self.by_layer, roots, decisive).regions():
            if sum(not (is_view(node) or node.target is operator.getitem) for node in found) >= self.at_least:
                (regions if _shares_a_kernel(found, roots) else unfused).append(found)
        for number, region in enumerate(regions):
            why = next((decisive[node] for node in region if node in decisive and is_half(node)), None)
            for node in region:
                info(node).region, info(node).rounded = number, why is not None
            reason = f"region {number}: {len(region)} nodes from here on"
            if why is not None:
                reason += f"; half precision is rounded as op by op, for {info(why).name}"
            program.note("compiled regions", info(region[0]).name, reason)
        if unfused:
            subject = ", ".join(info(found[0]).name for found in unfused)
            reason = "nodes from here on run op by op, as no two of their ops can share a kernel"
            program.note("compiled regions", subject, reason)
        return bool(regions)


def _decisive(program: Program, roots: Roots) -> dict[fx.Node, fx.Node]:
    """What is computed on the way to an op that may have a jump, with that op: the last bit says on which side it is.

    The caller may do anything with what a module returns. Of a single number, the loss, it takes the gradient.
    """
    handed_out = [node for node in _handed_out(program) if is_float(node) and _is_large(node)]
    found = {each: node for node in handed_out for each in (node, roots[node])}
    for node in reversed(program.graph.nodes):
        decides = may_jump(node) and node is not program.loss and info(node).phase != "update"
        why = node if decides else found.get(node)
        why = why or next((found[roots[place]] for place in written_nodes(node) if roots[place] in found), None)
        if why is not None:
            for value in numbers_read(node):
                found.setdefault(value, why)
                found.setdefault(roots[value], why)
    return found


def _handed_out(program: Program) -> Sequence[fx.Node]:
    if program.has_two_halves:
        return outputs_of(program)
    return () if program.training else program.returned


def _shares_a_kernel(region: Sequence[fx.Node], roots: Roots) -> bool:
    """Whether Inductor can compute two ops in one kernel, as one reads what the other makes, or both read the same."""
    kernels = [node for node in region if not (is_view(node) or node.target is operator.getitem or is_product(node))]
    made = set(kernels)
    read: set[fx.Node] = set()
    for node in kernels:
        for value in {_maker(roots[value]) for value in node.all_input_nodes if value not in written_nodes(node)}:
            if value in made or value in read or (node.target is aten.add.Tensor and value.target is aten.mm.default):
                return True  # Inductor adds to a product while it is computed
            if not info(value).once and _is_large(value):
                read.add(value)
    return False


def _maker(node: fx.Node) -> fx.Node:
    """The op with several results of which the node is one; the node itself if there is none."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _is_large(value: fx.Node) -> bool:
    spec = info(value).spec
    return not isinstance(spec, TensorSpec) or spec.numel > 1


def _join_results(program: Program) -> None:
    """Let the results of an op with several stand right behind it, so that no region ends between."""
    for node in [*program.graph.nodes]:
        if isinstance(info(node).spec, tuple) and _computes(node):
            for result in reversed([user for user in node.users if user.target is operator.getitem]):
                node.append(result)


class _Cutter:
    """Finds the longest runs of nodes that can be one function."""

    def __init__(self, program: Program, by_layer: bool, roots: Roots, decisive: Container[fx.Node]) -> None:
        self.by_layer, self.decisive = by_layer, decisive
        self.layer = ""
        self.nodes = list(program.graph.nodes)
        self.roots = roots
        self.anchors = {info(node).next_step for node in self.nodes}
        """Nodes before which something of the last step runs."""
        self.written = {self.roots[value] for node in self.nodes for value in written_nodes(node)}
        self.region: dict[fx.Node, None] = {}
        self.filled: dict[fx.Node, list[fx.Node]] = {}
        """By its root the places of memory that the region fills."""
        self.first: dict[Hashable, fx.Node] = {}
        self.same: dict[fx.Node, fx.Node] = {}

    def regions(self) -> Iterator[list[fx.Node]]:
        for node in self.nodes:
            if node in self.anchors or self._is_of_another_layer(node) or self._is_computed_again(node):
                yield from self._cut()
            if any(self.roots[value] in self.region for value in found_in_memory(node)):
                yield from self._cut()
            if info(node).once:
                pass  # its value is there when the step begins
            elif node.target is operator.getitem:
                if node.args[0] in self.region:
                    self.region[node] = None
            elif is_view(node) and self.roots[node] in self.written and not _computes(self.roots[node]):
                continue  # of memory that no region has made, so it depends on none
            elif node.target is aten.empty.memory_format:
                continue
            elif node.op in ("call_function", "output") and not self._joined(node):
                yield from self._cut()
                self._joined(node)
            if info(node).sends:
                yield from self._cut()

    def _is_of_another_layer(self, node: fx.Node) -> bool:
        if not self.by_layer or not (_computes(node) and not is_view(node)):
            return False
        before, self.layer = self.layer, _layer(info(node).module)
        return before != self.layer

    def _is_computed_again(self, node: fx.Node) -> bool:
        """Whether the backward computes what the region has computed in the forward, so that nobody keeps it until
        then. In one region a compiler may do both in one kernel, and keep it."""
        if info(node).once or not _computes(node):
            return False
        first = self.first.setdefault(equality_key(node, self.same), node)
        if first is node:
            return False
        self.same[node] = first
        return first in self.region and not is_view(node) and info(first).phase != info(node).phase

    def _cut(self) -> Iterator[list[fx.Node]]:
        if self.region:
            yield list(self.region)
        self.region, self.filled = {}, {}

    def _joined(self, node: fx.Node) -> bool:
        """Take the node into the region if it belongs there. What it reads, the region must not have written: compiled
        code does not know that two of its inputs lie in one block of memory."""
        if node in self.decisive and is_rounded_otherwise(node):
            return False
        places = written_nodes(node)
        if any(self.roots[value] in self.filled for value in node.all_input_nodes if value not in places):
            return False
        if not (_computes(node) or self._fills(node)):
            return False
        self.region[node] = None
        for place in places:
            self.filled.setdefault(self.roots[place], []).append(place)
        return True

    def _fills(self, node: fx.Node) -> bool:
        """Whether the node fills a place in memory from outside, and a kernel can write what it computes right there.

        Products of matrices are left out: Inductor calls a library for them, and would copy what it returns.
        """
        if node.users or not _is_plain_call(node) or node.target in _BY_LIBRARY:
            return False
        places = written_nodes(node)
        return all(self._is_free(place) for place in places) and len(places) == 1

    def _is_free(self, place: fx.Node) -> bool:
        root = self.roots[place]
        if root.target is not aten.empty.memory_format or place in self.region:
            return False
        if any(self.roots[value] is root for node in self.region for value in node.all_input_nodes):
            others = self.filled.get(root, [])
            return bool(others) and all(_apart(place, other) for other in others)
        return True


def _apart(place: fx.Node, other: fx.Node) -> bool:
    """Whether two places in one block of memory have no element in common."""
    if place.target is not aten.as_strided.default or other.target is not aten.as_strided.default:
        return False
    if not (tensor_spec(place).is_dense and tensor_spec(other).is_dense):
        return False
    (begin, size), (other_begin, other_size) = map(_stretch, (place, other))
    return begin + size <= other_begin or other_begin + other_size <= begin


def _stretch(place: fx.Node) -> tuple[int, int]:
    args: Any = place.args
    return args[3], tensor_spec(place).numel


def _layer(path: str) -> str:
    """The path up to its first number: the layer of a list of layers. "" outside of lists."""
    parts = path.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def _computes(node: fx.Node) -> bool:
    """Whether the node computes tensors from tensors, and touches nothing that others see."""
    return _is_plain_call(node) and not written_nodes(node)


def _is_on_cpu(node: fx.Node) -> bool:
    specs = [info(value).spec for value in node.all_input_nodes]
    return all(isinstance(spec, TensorSpec) and spec.device == "cpu" for spec in specs)


def _is_plain_call(node: fx.Node) -> bool:
    if node.op != "call_function" or info(node).phase not in ("forward", "backward") or info(node).once:
        return False
    if info(node).next_step is not None or node.target is aten.empty.memory_format:
        return False
    if is_start(node) or is_wait(node) or is_opaque(node) or node.target in LEFT_OUT or is_computed_wrongly(node):
        return False
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in _KNOWN:
        return False
    if node.target in LEFT_OUT_ON_CPU and _is_on_cpu(node):
        return False
    return all(isinstance(info(value).spec, TensorSpec) for value in node.all_input_nodes)
