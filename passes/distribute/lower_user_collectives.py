"""Turn the collectives that users wrote in the model (`cf.ops`) into starts and waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.builder import Builder
from commfuse_fx.ir.core.collectives import c10d
from commfuse_fx.ir.core.edit import replace
from commfuse_fx.ir.core.meta import CollectiveInfo, TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ops import NO_FUSION_ID
from commfuse_fx.passes.declaration import Pass, Situation

aten = torch.ops.aten
user = torch.ops.commfuse


@dataclass(frozen=True)
class LowerUserCollectives(Pass):
    """A group of one rank and a tensor without elements need no collective."""

    name = "lower_user_collectives"
    numerics = "defines"
    ensures = ("lowered",)

    @classmethod
    def when(cls, situation: Situation) -> LowerUserCollectives | None:
        return None if situation.divides else cls()

    def __call__(self, program: Program) -> bool:
        modified = False
        sequence = len(program.params)
        for node in list(program.graph.nodes):
            lower = _LOWER.get(node.target) if node.op == "call_function" else None
            if lower is None:
                continue
            modified = True
            build = Builder(program)
            _lay_out_operand(build, node)
            result = lower(build, node, sequence)
            sequence += 1
            replace(program, node, result)
            program.graph.erase_node(node)
        return modified


def _lay_out_operand(build: Builder, node: fx.Node) -> None:
    """Results are contiguous, as in eager execution, also where a group of one rank has its operand for a result."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    spec = tensor_spec(x)
    if not spec.is_contiguous:
        kwargs = {"memory_format": torch.contiguous_format}
        name = f"{info(node).name}/contiguous"
        with build.before(node):
            plain = build.call(
                aten.clone.default, (x,), kwargs, spec=spec.with_shape(spec.shape), like=info(node), name=name
            )
        node.args = (plain, *node.args[1:])


def _start(
    build: Builder,
    node: fx.Node,
    kind: str,
    target: Any,
    args: tuple[Any, ...],
    spec: TensorSpec,
    **details: Any,
) -> fx.Node:
    """A start before `node` and its wait."""
    fusion = details.pop("fusion")
    name = info(node).name
    full = max(spec.nbytes, tensor_spec(args[0]).nbytes)
    collective = CollectiveInfo(
        kind,
        dtype=spec.dtype,
        nbytes=full,
        members=(name,),
        fusion_id=None if fusion == NO_FUSION_ID else fusion,
        **details,
    )
    with build.before(node):
        start = build.call(target, args, spec=spec, like=info(node), name=f"{name}/{kind}", collective=collective)
        return build.wait(start, f"{name}/wait")


def _trivial(spec: TensorSpec, size: int) -> bool:
    return size == 1 or spec.numel == 0


def _all_reduce(build: Builder, node: fx.Node, sequence: int) -> fx.Node:
    x, op, size, group, fusion = node.args
    spec = tensor_spec(x)  # type: ignore[arg-type]
    if _trivial(spec, size):  # type: ignore[arg-type]
        return x  # type: ignore[return-value]
    return _start(
        build, node, "all_reduce", c10d.all_reduce.default, (x, op, group), spec,
        group=group, sequence=sequence, reduce_op=op, fusion=fusion,
    )  # fmt: skip


def _all_gather(build: Builder, node: fx.Node, sequence: int) -> fx.Node:
    x, size, group, fusion = node.args
    spec = tensor_spec(node)
    if size == 1:
        return x  # type: ignore[return-value]
    if spec.numel == 0:
        return _empty(build, node, spec)
    return _start(
        build, node, "all_gather", c10d.all_gather_into_tensor.default, (x, size, group), spec,
        group=group, sequence=sequence, fusion=fusion,
    )  # fmt: skip


def _reduce_scatter(build: Builder, node: fx.Node, sequence: int) -> fx.Node:
    x, op, size, group, fusion = node.args
    assert isinstance(x, fx.Node) and isinstance(size, int)
    spec = tensor_spec(node)
    if size == 1:
        return x
    if spec.numel == 0:
        return _empty(build, node, spec)
    given = tensor_spec(x)
    missing = spec.shape[0] * size - given.shape[0]
    if missing:
        padded = given.with_shape((given.shape[0] + missing, *given.shape[1:]))
        padding = [0, 0] * (len(given.shape) - 1) + [0, missing]
        name = f"{info(node).name}/pad"
        with build.before(node):
            x = build.call(aten.constant_pad_nd.default, (x, padding, 0), spec=padded, like=info(node), name=name)
    return _start(
        build, node, "reduce_scatter", c10d.reduce_scatter_tensor.default, (x, op, size, group), spec,
        group=group, sequence=sequence, reduce_op=op, fusion=fusion,
    )  # fmt: skip


def _broadcast(build: Builder, node: fx.Node, sequence: int) -> fx.Node:
    x, src, size, group, fusion = node.args
    spec = tensor_spec(x)  # type: ignore[arg-type]
    if _trivial(spec, size):  # type: ignore[arg-type]
        return x  # type: ignore[return-value]
    return _start(
        build, node, "broadcast", c10d.broadcast.default, (x, src, group), spec,
        group=group, sequence=sequence, fusion=fusion,
    )  # fmt: skip


def _all_to_all(build: Builder, node: fx.Node, sequence: int) -> fx.Node:
    x, size, group, fusion = node.args
    assert isinstance(x, fx.Node) and isinstance(size, int)
    spec = tensor_spec(x)
    if _trivial(spec, size):
        return x
    splits = [spec.shape[0] // size] * size
    args = (x, splits, splits, group)
    return _start(
        build, node, "all_to_all", c10d.all_to_all_single.default, args, spec,
        group=group, sequence=sequence, fusion=fusion,
    )  # fmt: skip


def _empty(build: Builder, node: fx.Node, spec: TensorSpec) -> fx.Node:
    kwargs = {"dtype": spec.dtype, "device": torch.device(spec.device)}
    name = f"{info(node).name}/empty"
    with build.before(node):
        args = (list(spec.shape),)
        return build.call(aten.empty.memory_format, args, kwargs, spec=spec, like=info(node), name=name)


_LOWER: dict[Any, Callable[[Builder, fx.Node, int], fx.Node]] = {
    user.all_reduce.default: _all_reduce,
    user.all_gather.default: _all_gather,
    user.reduce_scatter.default: _reduce_scatter,
    user.broadcast.default: _broadcast,
    user.all_to_all.default: _all_to_all,
}
