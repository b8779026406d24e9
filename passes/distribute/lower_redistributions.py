"""Turn changes of layout into collectives: a start, a wait, and what brings the data into the order they need.

Why: docs/decisions.md, "The order of sums over several axes is mended after all axes are divided".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.collectives import c10d
from commfuse_fx.ir.core.edit import remove_dead_nodes, replace_all
from commfuse_fx.ir.core.meta import CollectiveInfo, TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.gradients import end_of_backward, separate_gradients
from commfuse_fx.ir.ops.parameter_values import parameter_of
from commfuse_fx.ir.ops.redistribution import (
    exchange_parts,
    gather_parts,
    is_redistribution,
    sum_and_divide,
    sum_partial,
)
from commfuse_fx.passes.declaration import Pass, Situation


@dataclass(frozen=True)
class LowerRedistributions(Pass):
    """Sums of one tensor over several axes in a row become one over all of them, and so do gathers. Of a sum each rank
    may get the whole, or its part along one dimension."""

    name = "lower_redistributions"
    numerics = "defines"
    requires = ("simplified",)
    ensures = ("lowered", "reduced")

    @classmethod
    def when(cls, situation: Situation) -> LowerRedistributions | None:
        return cls() if situation.divides else None

    def __call__(self, program: Program) -> bool:
        merged = _merge_sums(program) + _merge_parts(program, gather_parts) + _merge_parts(program, sum_and_divide)
        build = Builder(program)
        results: dict[fx.Node, fx.Node] = {}
        sequence = len(program.params)
        nodes = [node for node in program.graph.nodes if is_redistribution(node)]
        for node in nodes:
            results[node] = _LOWER[node.target](_Lowering(build, node, sequence))
            sequence += 1
        replace_all(program, results)
        remove_dead_nodes(program)
        separated = separate_gradients(build) if program.grads else False
        program.set_output()
        return bool(nodes) or bool(merged) or separated


def _merge_sums(program: Program) -> int:
    """sum over a of sum over b -> sum over a and b."""
    merged = 0
    for node in [node for node in program.graph.nodes if node.target is sum_partial]:
        inner: Any = node.args[0]
        if inner.target is sum_partial and len(inner.users) == 1 and inner.args[2] == node.args[2]:
            groups = {*inner.args[1].split(","), *node.args[1].split(",")}
            group = ",".join(name for name in program.mesh.names if name in groups)
            node.args = (inner.args[0], group, node.args[2])
            info(node).serves = info(node).serves or info(inner).serves
            program.graph.erase_node(inner)
            merged += 1
    return merged


def _merge_parts(program: Program, target: Any) -> int:
    """Parts along one dimension, divided first by a and then by b: one gather over both of them, or one sum over both,
    of which each rank gets such a part. target: the function of either."""
    merged = 0
    names = list(program.mesh.names)
    for node in [node for node in program.graph.nodes if node.target is target]:
        inner: Any = node.args[0]
        if inner.target is not target or len(inner.users) != 1 or inner.args[3:] != node.args[3:]:
            continue
        outer, last = (node, inner) if target is gather_parts else (inner, node)  # a gather begins with the last
        axes = [*outer.args[1].split(","), *last.args[1].split(",")]
        if node.args[4] != 1 or [names.index(axis) for axis in axes] != sorted(names.index(axis) for axis in axes):
            continue
        ways = node.args[2] * inner.args[2]
        node.args = (inner.args[0], ",".join(axes), ways, *node.args[3:])
        info(node).serves = info(node).serves or info(inner).serves
        program.graph.erase_node(inner)
        merged += 1
    return merged


class _Lowering:
    """Emits the nodes that take the place of one redistribution, before it."""

    def __init__(self, build: Builder, node: fx.Node, sequence: int) -> None:
        self.build = build
        self.node = node
        self.name = info(node).name
        self.serves = info(node).serves
        gathered = parameter_of(build.program, node) if node.target is gather_parts else None
        self.role = "gradient" if self.serves else "redistribution" if gathered is None else "parameter"
        self.members = self.serves or (self.name if gathered is None else gathered,)
        first = build.program.params.get(self.members[0]) if self.role != "redistribution" else None
        self.sequence = sequence if first is None else first.sequence
        self.fusion_id = None if first is None else first.fusion_id

    def call(self, target: Any, args: tuple[Any, ...], spec: TensorSpec, suffix: str, **fields: Any) -> fx.Node:
        with self.build.before(self.node):
            kwargs = fields.pop("kwargs", None)
            return self.build.call(
                target, args, kwargs, spec=spec, like=info(self.node), name=f"{self.name}/{suffix}", **fields
            )

    def contiguous(self, x: fx.Node, suffix: str = "contiguous") -> fx.Node:
        spec = tensor_spec(x)
        if spec.is_contiguous:
            return x
        kwargs = {"memory_format": torch.contiguous_format}
        return self.call(aten.clone.default, (x,), spec.with_shape(spec.shape), suffix, kwargs=kwargs)

    def view(self, x: fx.Node, shape: tuple[int, ...], suffix: str) -> fx.Node:
        spec = tensor_spec(x)
        if spec.shape == shape:
            return x
        return self.call(aten.view.default, (x, list(shape)), spec.with_shape(shape), suffix)

    def permute(self, x: fx.Node, order: list[int], suffix: str) -> fx.Node:
        """Permuted and contiguous."""
        if order == sorted(order):
            return x
        spec = tensor_spec(x)
        shape = tuple(spec.shape[dim] for dim in order)
        stride = tuple(spec.stride[dim] for dim in order)
        permuted = TensorSpec(shape, spec.dtype, stride, spec.device)
        return self.contiguous(self.call(aten.permute.default, (x, order), permuted, suffix), f"{suffix}.contiguous")

    def start_and_wait(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        spec: TensorSpec,
        group: str,
        nbytes: int,
        op: str | None,
        late: bool = False,
    ) -> fx.Node:
        """`late`: the wait stands at the end of the backward where only the update uses the result."""
        collective = CollectiveInfo(
            kind,
            group=group,
            dtype=spec.dtype,
            nbytes=nbytes,
            members=self._members(kind, spec),
            sequence=self.sequence,
            reduce_op=op,
            fusion_id=self.fusion_id,
            role=self.role,
        )
        start = self.call(target, args, spec, kind, collective=collective)
        last = end_of_backward(self.build.program) if late and self.serves and self._is_final() else self.node
        with self.build.before(last):
            return self.build.wait(start, f"{self.name}/wait")

    def _members(self, kind: str, spec: TensorSpec) -> tuple[str, ...]:
        """A gradient that is reduced in parts, to be gathered after, does not lie in memory as its parameter does."""
        params = self.build.program.params
        if kind == "all_reduce" and any(params[name].spec.shape != spec.shape for name in self.serves):
            return (self.name,)
        return self.members

    def _is_final(self) -> bool:
        """Whether nothing but the update uses the result."""
        return all(user.op == "output" for user in self.node.users)


def _sum(low: _Lowering) -> fx.Node:
    x, group, op = low.node.args
    assert isinstance(x, fx.Node) and isinstance(group, str) and isinstance(op, str)
    x = low.contiguous(x)
    spec = tensor_spec(x)
    if spec.numel == 0:
        return x
    args = (x, op, group)
    return low.start_and_wait("all_reduce", c10d.all_reduce.default, args, spec, group, spec.nbytes, op, late=True)


def _sum_and_divide(low: _Lowering) -> fx.Node:
    x, group, ways, dim, blocks = low.node.args
    assert isinstance(x, fx.Node) and isinstance(group, str)
    assert isinstance(ways, int) and isinstance(dim, int) and isinstance(blocks, int)
    spec = tensor_spec(x)
    local = tensor_spec(low.node)
    x = _parts_first(low, low.contiguous(x), dim, blocks, ways)
    flat = low.view(x, (spec.numel,), "flat")
    out = TensorSpec.flat(local.numel, spec)
    args = (flat, "sum", ways, group)
    target = c10d.reduce_scatter_tensor.default
    wait = low.start_and_wait("reduce_scatter", target, args, out, group, spec.nbytes, "sum")
    return low.view(wait, local.shape, "part")


def _gather(low: _Lowering) -> fx.Node:
    x, group, ways, dim, blocks = low.node.args
    assert isinstance(x, fx.Node) and isinstance(group, str)
    assert isinstance(ways, int) and isinstance(dim, int) and isinstance(blocks, int)
    local = tensor_spec(x)
    whole = tensor_spec(low.node)
    flat = low.view(low.contiguous(x), (local.numel,), "flat")
    out = TensorSpec.flat(whole.numel, local)
    args = (flat, ways, group)
    target = c10d.all_gather_into_tensor.default
    wait = low.start_and_wait("all_gather", target, args, out, group, whole.nbytes, None)
    # (ways, ..., blocks, size, ...) -> (..., blocks, ways, size, ...)
    size = local.shape[dim] // blocks
    before, after = local.shape[:dim], local.shape[dim + 1 :]
    parts = low.view(wait, (ways, *before, blocks, size, *after), "parts")
    order = [*range(1, dim + 2), 0, *range(dim + 2, len(local.shape) + 2)]
    if all(each == 1 for each in (*before, blocks)):
        return low.view(parts, whole.shape, "whole")
    return low.view(low.permute(parts, order, "in_order"), whole.shape, "whole")


def _parts_first(low: _Lowering, x: fx.Node, dim: int, blocks: int, ways: int) -> fx.Node:
    """(..., blocks * ways * size, ...) -> (ways, ..., blocks, size, ...), contiguous."""
    shape = tensor_spec(x).shape
    size = shape[dim] // (ways * blocks)
    before, after = shape[:dim], shape[dim + 1 :]
    if all(each == 1 for each in (*before, blocks)):
        return x
    parts = low.view(x, (*before, blocks, ways, size, *after), "parts")
    order = [dim + 1, *range(dim + 1), *range(dim + 2, len(shape) + 2)]
    return low.permute(parts, order, "by_rank")


def _exchange(low: _Lowering) -> fx.Node:
    x, group, ways, from_dim, to_dim = low.node.args
    assert isinstance(x, fx.Node) and isinstance(group, str)
    assert isinstance(ways, int) and isinstance(from_dim, int) and isinstance(to_dim, int)
    local = tensor_spec(x)
    result = tensor_spec(low.node)
    sent = _parts_first(low, low.contiguous(x), to_dim, 1, ways)
    flat = low.view(sent, (local.numel,), "flat")
    splits = [local.numel // ways] * ways
    args = (flat, splits, splits, group)
    out = TensorSpec.flat(local.numel, local)
    target = c10d.all_to_all_single.default
    wait = low.start_and_wait("all_to_all", target, args, out, group, local.nbytes, None)
    # (ways, part of to_dim and whole part of from_dim) -> from_dim = (ways, size)
    part = tuple(size // ways if dim == to_dim else size for dim, size in enumerate(local.shape))
    parts = low.view(wait, (ways, *part), "parts")
    order = [*range(1, from_dim + 1), 0, *range(from_dim + 1, len(part) + 1)]
    return low.view(low.permute(parts, order, "in_order"), result.shape, "whole")


_LOWER: dict[Any, Callable[[_Lowering], fx.Node]] = {
    sum_partial: _sum,
    sum_and_divide: _sum_and_divide,
    gather_parts: _gather,
    exchange_parts: _exchange,
}
