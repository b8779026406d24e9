"""Merge several collectives into one: flatten, concat, one start, one wait, split, restore shapes.

Members lie one behind the other, on input and output. Those of an all_gather have W times as many elements on output,
W being the number of ranks, and those of a reduce_scatter W times as many on input.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.collectives import BY_MEMBERS, WAIT, collective_of, kind_of, wait_of
from commfuse_fx.ir.core.meta import NodeInfo, Part, Spec, TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.reshaped import reshaped


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
            start, results = self._built()
        info(start).parts = tuple(
            Part(collective_of(old).members, value, result)
            for old, value, result in zip(self.starts, self.inputs, results, strict=True)
        )
        return results

    def _built(self) -> tuple[fx.Node, list[fx.Node]]:
        """The start and the members' results. Rows are those of the first dimension, and keep their order."""
        is_of_rows = self.starts[0].target in BY_MEMBERS
        results = [tensor_spec(wait) for wait in self.waits]
        if not is_of_rows:
            results = [_dense(tensor_spec(value)) for value in self.inputs]
        flatten = self.in_rows if is_of_rows else self.flatten
        flat = [flatten(value, i) for i, value in enumerate(self.inputs)]
        given = TensorSpec.flat(sum(tensor_spec(value).numel for value in self.inputs), results[0])
        total = TensorSpec.flat(sum(spec.numel for spec in results), given)
        concat = self.node(aten.cat.default, (flat, 0), given, "concat", self.input_at)
        start, wait = self.communicate(concat, total)
        return start, self.restored(wait, results)

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
        target, args = first.target, first.args[1:]
        if target in BY_MEMBERS:
            pairs = zip(self.starts, self.inputs, strict=True)
            sizes = [min(tensor_spec(start).numel, tensor_spec(given).numel) for start, given in pairs]
            target, args = BY_MEMBERS[target], (*args, sizes)
        start = self.node(target, (value, *args), spec, kind_of(first), self.input_at)
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
        return self.in_rows(value, number)

    def in_rows(self, value: fx.Node, number: int) -> fx.Node:
        """One dimension, in the order of indices; as a view, which need not be contiguous, where strides allow it."""
        if tensor_spec(value).is_contiguous:
            return self.flatten(value, number)
        spec = reshaped(tensor_spec(value), (tensor_spec(value).numel,))
        return self.node(aten.reshape.default, (value, [-1]), spec, f"flatten.{number}", self.input_at)

    def restored(self, wait: fx.Node, specs: Sequence[TensorSpec]) -> list[fx.Node]:
        """The members' results, in their shapes and strides."""
        flat = [TensorSpec.flat(spec.numel, spec) for spec in specs]
        sizes = [spec.numel for spec in specs]
        whole = self.node(aten.split_with_sizes.default, (wait, sizes, 0), tuple(flat), "split", self.output_at)
        parts = [
            self.node(operator.getitem, (whole, i), spec, f"part.{i}", self.output_at) for i, spec in enumerate(flat)
        ]
        return [self._restored(part, spec, i) for i, (part, spec) in enumerate(zip(parts, specs, strict=True))]

    def _restored(self, part: fx.Node, spec: TensorSpec, number: int) -> fx.Node:
        label, shape = f"restore.{number}", list(spec.shape)
        if spec.is_contiguous:
            return self.node(aten.view.default, (part, shape), spec, label, self.output_at)
        return self.node(aten.as_strided.default, (part, shape, list(spec.stride)), spec, label, self.output_at)


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
