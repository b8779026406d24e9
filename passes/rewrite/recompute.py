"""Compute cheap values of the forward again in the backward, where that keeps less memory between the two.

What is kept is a minimum cut between what the forward has to compute once and what the backward reads, as in
"Min-cut optimal recomputation with AOTAutograd" (H. He, 2022). A compiler then computes what was cut off in the kernel
that reads it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import networkx as nx
import torch
from torch import fx

from commfuse_fx.cost.memory import bytes_of
from commfuse_fx.ir.core.builder import Builder
from commfuse_fx.ir.core.dependence import Roots, is_view
from commfuse_fx.ir.core.edit import erase_upwards
from commfuse_fx.ir.core.meta import TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.core.random_draws import draws_random_numbers
from commfuse_fx.ir.ops.fixed_values import written_or_handed_out
from commfuse_fx.ir.ops.fusible import is_of_elements, takes_in
from commfuse_fx.ir.ops.unwritten import is_unwritten
from commfuse_fx.passes.declaration import Pass, Situation

aten = torch.ops.aten

_ZEROS_AND_ONES = (aten.bernoulli.p, aten.bernoulli.default)


@dataclass(frozen=True)
class Recompute(Pass):
    """Values are computed again that take no more than reading what is kept: element by element, without random
    numbers. A value that a library reads, such as that of a product, has to be in memory then, and is kept. Of what
    dropout has drawn, one byte per element is kept.

    on_cpu: also where parameters are on a CPU. Computing takes longer than keeping there: steps of a GPT-2 on two ranks
        took 16% longer.
    at_least: bytes that a program has to save between forward and backward; less is not worth a change.
    """

    name = "recompute"
    numerics = "bitwise"
    needs_sizes = True
    requires = ("simplified",)

    at_least: int = 1 << 10
    on_cpu: bool = False

    @classmethod
    def when(cls, situation: Situation) -> Recompute | None:
        if situation.config.backend != "inductor" or situation.divides:
            return None
        # Ranks whose batches differ come to one plan only if sizes decide nothing.
        return cls() if situation.same_batches else None

    def __call__(self, program: Program) -> bool:
        if not self.on_cpu and any(param.spec.device == "cpu" for param in program.params.values()):
            return False
        if not program.has_two_halves and not any(True for _ in program.collectives()):
            return False  # one region holds all, and its compiler decides what it keeps
        wanted = _wanted(program)
        if not wanted:
            return False
        cut = _Cut(program, wanted)
        try:
            saved = cut.kept()
        except nx.NetworkXUnbounded:  # something that the backward reads is gone, and it takes more to compute it
            return False
        before = sum(bytes_of(info(root).spec) for root in cut.memory_of(wanted))
        after = sum(cut.bytes_kept(root) for root in cut.memory_of(saved))
        if before - after < self.at_least and program.saved is None:
            return False
        _Copies(program, dict.fromkeys(saved), cut.packed).make(wanted)
        program.note("computed again", "backward", f"{before - after} bytes are not kept from the forward")
        return True


def _wanted(program: Program) -> list[fx.Node]:
    """The values of the forward that the backward reads, in the order of the graph."""
    read: dict[fx.Node, None] = {}
    for node in program.graph.nodes:
        if _is_of(node, "backward"):
            read.update(dict.fromkeys(node.all_input_nodes))
    if program.has_two_halves:
        read.pop(program.loss, None)  # which stands for the gradients of the outputs there
    return [node for node in program.graph.nodes if node in read and _is_of(node, "forward")]


def _is_of(node: fx.Node, phase: str) -> bool:
    return node.op == "call_function" and info(node).phase == phase and not info(node).once


class _Cut:
    """A cut through the forward: on one side what is computed once, on the other what the backward computes again."""

    def __init__(self, program: Program, wanted: Iterable[fx.Node]) -> None:
        self.program = program
        self.wanted = dict.fromkeys(wanted)
        self.roots = Roots(program.graph, program.aliases())
        self.fixed = dict.fromkeys(self.roots[node] for node in written_or_handed_out(program))
        self.materialised = self._materialised()
        there = None if program.saved is None else dict.fromkeys(program.saved)
        masks = [node for node in program.graph.nodes if node.target in _ZEROS_AND_ONES and self._may_be_packed(node)]
        self.packed = {node: None for node in masks if there is None or _packed(node) in there}
        """What is kept as truth values."""
        self.is_there = {
            node: None
            for node in program.graph.nodes
            if there is not None and (info(node).name in there or node in self.packed)
        }
        """What a forward has saved that has been planned already. Its other values are gone."""
        self.given = {
            node: None
            for node in program.sources
            if node in self.is_there or any(_is_of(user, "backward") for user in node.users)
        }
        """Parameters and inputs that the backward reads anyhow. It must not read others: the user may change them."""

    def memory_of(self, values: Iterable[fx.Node]) -> dict[fx.Node, None]:
        """The blocks of memory that hold these values, without what is there anyhow."""
        roots = dict.fromkeys(self.roots[value] for value in values)
        return {root: None for root in roots if root.op == "call_function"}

    def bytes_kept(self, node: fx.Node) -> int:
        """What it takes to keep a value."""
        root = self.roots[node]
        return tensor_spec(root).numel if root in self.packed else bytes_of(info(root).spec)

    def kept(self) -> list[fx.Node]:
        """The values to keep, in the order of the graph."""
        network = nx.DiGraph()
        number = {node: i for i, node in enumerate(self.program.graph.nodes)}
        reached: dict[fx.Node, None] = {}
        left = list(self.wanted)
        for node in left:
            network.add_edge((number[node], 1), "backward")
        while left:
            node = left.pop()
            if node in reached:
                continue
            reached[node] = None
            place = number[node]
            if node in self.given or node in self.is_there:
                network.add_edge((place, 0), (place, 1), capacity=0)
            elif self._may_be_kept(node):
                network.add_edge((place, 0), (place, 1), capacity=self.bytes_kept(node))
            else:
                network.add_edge((place, 0), (place, 1))
            if not self._may_be_repeated(node):
                network.add_edge("forward", (place, 0))
                continue
            for value in node.all_input_nodes:
                if info(value).once or value.op == "get_attr":
                    continue
                network.add_edge((number[value], 1), (place, 0))
                left.append(value)
        again = _on_the_side_of("backward", network)
        kept = [node for node in reached if (number[node], 0) not in again and (number[node], 1) in again]
        return sorted(kept, key=number.__getitem__)

    def _may_be_packed(self, mask: fx.Node) -> bool:
        has_layout = _is_tensor(mask) and tensor_spec(mask).is_dense
        return has_layout and mask not in self.materialised and self.roots[mask] not in self.fixed

    def _may_be_kept(self, node: fx.Node) -> bool:
        """Whether the backward may read the value: it does already, or nothing can change it until then."""
        if self.roots[node] in self.packed:
            return node in self.packed
        if self.program.saved is not None:
            return False
        if node in self.wanted:
            return True
        return node.op == "call_function" and self.roots[node] not in self.fixed and _is_tensor(node)

    def _may_be_repeated(self, node: fx.Node) -> bool:
        if not _is_of(node, "forward") or node in self.materialised or not _is_tensor(node):
            return False
        if self.roots[node] in self.fixed or draws_random_numbers(node) or is_unwritten(node):
            return False
        if is_view(node):
            return node.target is not operator.getitem
        return is_of_elements(node)

    def _materialised(self) -> dict[fx.Node, None]:
        """Values that have to be in memory in the backward, as a library reads them or a view of them."""
        found: dict[fx.Node, None] = {}
        for node in reversed(self.program.graph.nodes):
            for user in node.users:
                if is_view(user):
                    needed = user in found
                else:
                    needed = _is_of(user, "backward") and not takes_in(user)
                if needed:
                    found[node] = None
        return {node: None for node in found if not is_view(node)}


def _on_the_side_of(sink: str, network: nx.DiGraph) -> set[object]:
    """The nodes that lie between a minimum cut and the sink: of all such cuts, the one next to the sink."""
    if "forward" not in network:
        return set(network)
    _, (_, again) = nx.minimum_cut(network, "forward", sink)
    found: set[object] = again
    return found


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(info(node).spec, TensorSpec)


class _Copies:
    """Makes the nodes of the backward that compute values of the forward again from those that are kept."""

    def __init__(self, program: Program, saved: dict[fx.Node, None], packed: Mapping[fx.Node, None]) -> None:
        self.saved = {node: None for node in saved if node not in packed}
        self.packed = packed
        self.builder = Builder(program)
        self.copy_of: dict[fx.Node, fx.Node] = {}

    def make(self, wanted: Iterable[fx.Node]) -> None:
        """Let the backward read copies in place of what is not kept, each made where it is first read."""
        again = {value: None for value in wanted if value not in self.saved}
        for node in [each for each in self.builder.graph.nodes if _is_of(each, "backward")]:
            for value in node.all_input_nodes:
                if value in again:
                    node.replace_input_with(value, self._copy(value, node))
        for value in again:
            if not (value.users or value._erased):
                erase_upwards(self.builder.program, value)

    def _copy(self, value: fx.Node, before: fx.Node) -> fx.Node:
        left = [value]
        while left:
            node = left[-1]
            inputs = [] if node in self.packed else node.all_input_nodes
            missing = [each for each in inputs if self._is_missing(each)]
            if node in self.copy_of or not missing:
                left.pop()
            else:
                left.extend(missing)
                continue
            if node not in self.copy_of:
                self.copy_of[node] = self._unpacked(node, before) if node in self.packed else self._call(node, before)
        return self.copy_of[value]

    def _is_missing(self, node: fx.Node) -> bool:
        return _is_of(node, "forward") and node not in self.saved and node not in self.copy_of

    def _call(self, node: fx.Node, before: fx.Node) -> fx.Node:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda value: self.copy_of.get(value, value))
        details = info(node)
        with self.builder.before(before):
            return self.builder.call(
                node.target,
                args,
                kwargs,
                spec=details.spec,
                like=details,
                name=f"{details.name}/again",
                phase="backward",
            )

    def _unpacked(self, node: fx.Node, before: fx.Node) -> fx.Node:
        spec, details = tensor_spec(node), info(node)
        with self.builder.after(node):
            kept = self.builder.cast(node, torch.bool, _packed(node))
        with self.builder.before(before):
            made = self.builder.cast(kept, spec.dtype, f"{details.name}/again")
        info(made).phase = "backward"
        return made


def _packed(node: fx.Node) -> str:
    """The name of what is kept of a value of zeros and ones."""
    return f"{info(node).name}/kept"
