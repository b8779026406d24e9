"""Merge several collectives into one: flatten, concat, one start, one wait, split, restore shapes.

The layout of each kind (W ranks, members with n_i elements, N = sum n_i):

- all_reduce, broadcast, reduce: [n_1 | n_2 | ...], the same on input and output.
- all_gather: input [n_1 | n_2 | ...], output rank-major [W, N], so each member is column slice
  [W, n_i] made contiguous.
- reduce_scatter: input interleaved by rank: row r holds every member's slice r, [W, N/W]; output
  is row r of the sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.builder import Builder, aten
from commfuse_fx.ir.collectives import WAIT, collective_of, kind_of, wait_of
from commfuse_fx.ir.meta import NodeInfo, Part, Spec, TensorSpec, info, tensor_spec
from commfuse_fx.ir.reshaped import reshaped


class Merge:
    """Replaces `starts` (in readiness order) and their waits by one bucket named `label`.

    `position` gives where nodes should stand; the new ones are added to it, to be put there by a
    stable sort: what makes the input with the last member, what uses the output with the first wait.
    """

    def __init__(self, build: Builder, starts: Sequence[fx.Node], label: str, position: dict[fx.Node, int]) -> None:
        self.build = build
        self.starts = list(starts)
        self.waits = [wait_of(start) for start in starts]
        self.inputs: list[fx.Node] = [start.args[0] for start in starts]  # type: ignore[misc]
        self.label = label
        self.position = position
        self.made: list[fx.Node] = []
        self.like = NodeInfo(info(starts[-1]).phase, source=info(starts[-1]).source)
        self.input_at = max(position[start] for start in starts)
        self.output_at = min(position[wait] for wait in self.waits)

    def run(self) -> list[fx.Node]:
        """Build the bucket; returns the members' results, which take the places of the old waits."""
        with self.build.before(self.starts[-1]):
            start, results = _LAYOUTS[kind_of(self.starts[0])](self)
        info(start).parts = tuple(
            Part(collective_of(old).members, value, result)
            for old, value, result in zip(self.starts, self.inputs, results, strict=True)
        )
        return results

    def node(
        self, target: Any, args: tuple[Any, ...], spec: Spec, label: str, at: int, kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        made = self.build.call(target, args, kwargs, spec=spec, like=self.like, name=f"{self.label}/{label}")
        self.position[made] = at
        self.made.append(made)
        return made

    def communicate(self, value: fx.Node, spec: TensorSpec) -> tuple[fx.Node, fx.Node]:
        """Start and wait on the concatenated input; all but sizes and members comes from the first start."""
        first = self.starts[0]
        start = self.node(first.target, (value, *first.args[1:]), spec, kind_of(first), self.input_at)
        infos = [collective_of(old) for old in self.starts]
        info(start).collective = replace(
            infos[0],
            nbytes=sum(each.nbytes for each in infos),
            members=tuple(name for each in infos for name in each.members),
            sequence=min(each.sequence for each in infos),
            role="gradient" if any(each.role == "gradient" for each in infos) else infos[0].role,
        )
        return start, self.node(WAIT, (start,), spec, "wait", self.output_at)

    def flatten(self, value: fx.Node, number: int) -> fx.Node:
        """One dimension, in memory order where the tensor is dense, so that strides survive the round trip."""
        spec = tensor_spec(value)
        flat = TensorSpec.flat(spec.numel, spec)
        label = f"flatten.{number}"
        if spec.is_contiguous:
            return self.node(aten.view.default, (value, [-1]), flat, label, self.input_at)
        if spec.is_dense:
            return self.node(aten.as_strided.default, (value, [spec.numel], [1]), flat, label, self.input_at)
        return self.in_row_major(value, number)

    def in_row_major(self, value: fx.Node, number: int) -> fx.Node:
        """One dimension, in the order of indices; as a view, which need not be contiguous, where strides allow it."""
        spec = reshaped(tensor_spec(value), (tensor_spec(value).numel,))
        return self.node(aten.reshape.default, (value, [-1]), spec, f"flatten.{number}", self.input_at)

    def concat(self, values: list[fx.Node], dim: int, spec: TensorSpec) -> fx.Node:
        return self.node(aten.cat.default, (values, dim), spec, "concat", self.input_at)

    def split(self, value: fx.Node, sizes: list[int], dim: int, parts: list[TensorSpec]) -> list[fx.Node]:
        whole = self.node(aten.split_with_sizes.default, (value, sizes, dim), tuple(parts), "split", self.output_at)
        return [
            self.node(operator.getitem, (whole, i), part, f"part.{i}", self.output_at) for i, part in enumerate(parts)
        ]

    def restore(self, value: fx.Node, spec: TensorSpec, number: int) -> fx.Node:
        """A member's result in its shape and strides. Its part of an all_gather's table has gaps, which views keep."""
        label, given = f"restore.{number}", tensor_spec(value)
        if not given.is_contiguous and not reshaped(given, spec.shape).is_contiguous:
            kwargs = {"memory_format": torch.contiguous_format}
            given = given.with_shape(given.shape)
            value = self.node(aten.clone.default, (value,), given, f"own.{number}", self.output_at, kwargs)
        if spec.is_contiguous:
            target = aten.view.default if given.is_contiguous else aten.reshape.default
            return self.node(target, (value, list(spec.shape)), spec, label, self.output_at)
        args = (value, list(spec.shape), list(spec.stride))
        return self.node(aten.as_strided.default, args, spec, label, self.output_at)


def before_merged(before: Mapping[fx.Node, Sequence[fx.Node]], merges: Sequence[Merge]) -> dict[fx.Node, list[fx.Node]]:
    """What must come before each node once these buckets stand for their members.

    A bucket waits for all that one of its members waited for, and what waited for a member waits for its bucket.
    """
    bucket: dict[fx.Node, fx.Node] = {}
    for merge in merges:
        wait = next(node for node in merge.made if node.target is WAIT)
        bucket.update(dict.fromkeys(merge.starts, wait.all_input_nodes[0]))
        bucket.update(dict.fromkeys(merge.waits, wait))

    def now(nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return list(dict.fromkeys(bucket.get(node, node) for node in nodes))

    found = {node: now(needed) for node, needed in before.items()}
    for merge in merges:
        needed = now(other for start in merge.starts for other in before[start])
        for node in merge.made:
            if node.target is WAIT:
                break
            found[node] = needed
    return found


def _dense(spec: TensorSpec) -> TensorSpec:
    return spec if spec.is_dense else spec.with_shape(spec.shape)


def _in_one_row(merge: Merge) -> tuple[fx.Node, list[fx.Node]]:
    specs = [_dense(tensor_spec(value)) for value in merge.inputs]
    sizes = [spec.numel for spec in specs]
    total = TensorSpec.flat(sum(sizes), specs[0])
    flat = [merge.flatten(value, i) for i, value in enumerate(merge.inputs)]
    start, wait = merge.communicate(merge.concat(flat, 0, total), total)
    parts = merge.split(wait, sizes, 0, [TensorSpec.flat(size, total) for size in sizes])
    return start, [merge.restore(part, spec, i) for i, (part, spec) in enumerate(zip(parts, specs, strict=True))]


def _all_gather(merge: Merge) -> tuple[fx.Node, list[fx.Node]]:
    world: int = merge.starts[0].args[1]  # type: ignore[assignment]
    sizes = [tensor_spec(value).numel for value in merge.inputs]
    results = [tensor_spec(wait) for wait in merge.waits]
    total = TensorSpec.flat(sum(sizes), results[0])
    flat = [
        merge.flatten(value, i) if tensor_spec(value).is_contiguous else merge.in_row_major(value, i)
        for i, value in enumerate(merge.inputs)
    ]
    start, wait = merge.communicate(merge.concat(flat, 0, total), TensorSpec.flat(world * total.numel, total))
    rows = total.with_shape((world, total.numel))
    table = merge.node(aten.view.default, (wait, list(rows.shape)), rows, "by_rank", merge.output_at)
    columns = [TensorSpec((world, size), rows.dtype, (total.numel, 1), rows.device) for size in sizes]
    parts = merge.split(table, sizes, 1, columns)
    return start, [merge.restore(part, spec, i) for i, (part, spec) in enumerate(zip(parts, results, strict=True))]


def _reduce_scatter(merge: Merge) -> tuple[fx.Node, list[fx.Node]]:
    world: int = merge.starts[0].args[2]  # type: ignore[assignment]
    results = [tensor_spec(wait) for wait in merge.waits]
    sizes = [spec.numel for spec in results]
    total = TensorSpec.flat(sum(sizes), results[0])
    columns: list[fx.Node] = []
    for i, value in enumerate(merge.inputs):
        spec = reshaped(tensor_spec(value), (world, sizes[i]))
        target = aten.view.default if tensor_spec(value).is_contiguous else aten.reshape.default
        columns.append(merge.node(target, (value, [world, sizes[i]]), spec, f"by_rank.{i}", merge.input_at))
    table = merge.concat(columns, 1, total.with_shape((world, total.numel)))
    whole = TensorSpec.flat(world * total.numel, total)
    flat = merge.node(aten.view.default, (table, [-1]), whole, "interleaved", merge.input_at)
    start, wait = merge.communicate(flat, total)
    parts = merge.split(wait, sizes, 0, [TensorSpec.flat(size, total) for size in sizes])
    return start, [merge.restore(part, spec, i) for i, (part, spec) in enumerate(zip(parts, results, strict=True))]


_LAYOUTS: dict[str, Callable[[Merge], tuple[fx.Node, list[fx.Node]]]] = {
    "all_reduce": _in_one_row,
    "broadcast": _in_one_row,
    "reduce": _in_one_row,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}
