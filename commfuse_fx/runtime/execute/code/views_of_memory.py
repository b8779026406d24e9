"""Views of memory that a program has in every step are made once: making one takes as long as a small kernel.

The flat memory of a bucket is either the program's own, and kept between steps, or the user holds parts of it as
gradients, and it is used again when they have been dropped.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.dependence import Roots, is_opaque
from commfuse_fx.ir.core.halves import crossing, outputs_of
from commfuse_fx.ir.core.meta import TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.runtime.memory.flat_pool import FlatPool

aten = torch.ops.aten


@dataclass(frozen=True)
class MemoryViews:
    """The nodes that make views of one block of memory. lent: those of them that the user gets."""

    own: tuple[fx.Node, ...]
    lent: tuple[fx.Node, ...] = ()


def views_of_memory(program: Program, but: Collection[fx.Node]) -> dict[fx.Node, MemoryViews]:
    """By the allocation of memory, the views of it that can be made with it.

    but: nodes that have to run where they stand.
    """
    roots = Roots(program.graph, program.aliases())
    made: dict[fx.Node, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.target is aten.empty.memory_format and node not in but and info(node).next_step is None:
            made[node] = []
        elif node.target is aten.as_strided.default and node not in but:
            memory, operand = roots[node], node.args[0]
            # The operand is the whole of the memory, as nothing else of it has as many elements in one row.
            if memory in made and tensor_spec(operand) == tensor_spec(memory):
                made[memory].append(node)
    seen = _seen_by_others(program)
    found: dict[fx.Node, MemoryViews] = {}
    for memory, views in made.items():
        if info(memory).kept:
            found[memory] = MemoryViews(tuple(views))
            continue
        lent = tuple(node for node in seen if roots[node] is memory)
        if lent and all(node in views for node in lent):
            found[memory] = MemoryViews(tuple(node for node in views if node not in lent), lent)
    return found


def _seen_by_others(program: Program) -> dict[fx.Node, None]:
    """Values that somebody may hold when the program has run."""
    seen = dict.fromkeys(program.output.all_input_nodes)
    for node in program.graph.nodes:
        if is_opaque(node):
            seen.update(dict.fromkeys(node.all_input_nodes))
    if program.has_two_halves:
        seen.update(dict.fromkeys([*outputs_of(program), *crossing(program)]))
    return seen


class TakenMemory:
    """What runs in place of an allocation: it returns the memory, its own views, and the lent ones."""

    _made: tuple[torch.Tensor, ...]
    _parts: list[torch.Tensor]

    def __init__(self, pool: FlatPool, memory: fx.Node, views: MemoryViews) -> None:
        self._pool = pool
        self._name, self._spec = info(memory).name, tensor_spec(memory)
        self._own, self._lent = [_place(node) for node in views.own], [_place(node) for node in views.lent]
        self.forget()
        pool.holders.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        free = self._pool.lend(self._name, self._spec) if self._lent else None
        block = self._pool.memory(self._name, self._spec) if free is None else free.memory
        if not self._made or self._made[0] is not block:
            own = (block.as_strided(part.shape, part.stride, offset) for part, offset in self._own)
            self._made = (block, *own)
            self._parts = [] if free is None else [free.part(*place) for place in self._lent]
        return (*self._made, *[part.detach() for part in self._parts])

    def forget(self) -> None:
        """Let go of the views, and with them of the memory."""
        self._made, self._parts = (), []


def _place(node: fx.Node) -> tuple[TensorSpec, int]:
    args: Any = node.args
    _, shape, stride, offset = args
    spec = tensor_spec(node)
    return TensorSpec(tuple(shape), spec.dtype, tuple(stride), spec.device), offset
