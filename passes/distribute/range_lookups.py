"""Write a lookup with indices 0, 1, 2, ... along every dimension as what it is: a permutation of dimensions.

Attention masks are built like that. A lookup cannot be divided along the dimension it looks into; a permutation can.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.edit import erase_upwards, replace_all
from commfuse_fx.ir.core.meta import TensorSpec, info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.passes.declaration import Pass, Situation


@dataclass(frozen=True)
class RangeLookups(Pass):
    """Numerics stay bitwise the same."""

    name = "range_lookups"
    numerics = "reordered"

    @classmethod
    def when(cls, situation: Situation) -> RangeLookups | None:
        return cls() if situation.divides else None

    def __call__(self, program: Program) -> bool:
        build = Builder(program)
        made: dict[fx.Node, fx.Node] = {}
        for node in program.graph.nodes:
            if node.target is aten.index.Tensor and (order := _order(node)) is not None:
                made[node] = _permuted(build, node, order)
        replace_all(program, made)
        for node in made:
            erase_upwards(program, node)
        return bool(made)


def _order(node: fx.Node) -> list[int] | None:
    """For each dimension of the tensor the dimension of the result that its index runs along."""
    x, indices = node.args[:2]
    assert isinstance(x, fx.Node) and isinstance(indices, (list, tuple))
    shape, rank = tensor_spec(x).shape, len(tensor_spec(node).shape)
    if len(indices) != len(shape):
        return None
    found: list[int] = []
    for size, index in zip(shape, indices, strict=True):
        if not isinstance(index, fx.Node) or size == 1 or tensor_spec(index).dtype == torch.bool:
            return None
        own = tensor_spec(index).shape
        long = [dim for dim, length in enumerate(own) if length != 1]
        if len(long) != 1 or own[long[0]] != size or not _counts(index):
            return None
        found.append(long[0] + rank - len(own))
    return found if len({*found}) == len(found) else None


def _counts(node: fx.Node) -> bool:
    """Whether the values are 0, 1, 2, ... in order."""
    args: Any = node.args
    if node.target in (aten.unsqueeze.default, aten._to_copy.default, aten.view.default):
        return _counts(args[0])
    if node.target is aten.add.Tensor and args[1] == 0:
        return _counts(args[0])
    return node.target is aten.arange.default or (node.target is aten.arange.start and bool(args[0] == 0))


def _permuted(build: Builder, node: fx.Node, order: list[int]) -> fx.Node:
    x: Any = node.args[0]
    given, wanted = tensor_spec(x), tensor_spec(node)
    dims = sorted(range(len(order)), key=order.__getitem__)
    like = info(node)
    value = x
    with build.before(node):
        if dims != sorted(dims):
            shape, stride = (tuple(each[dim] for dim in dims) for each in (given.shape, given.stride))
            spec = TensorSpec(shape, given.dtype, stride, given.device)
            value = build.call(aten.permute.default, (x, dims), spec=spec, like=like, name=f"{like.name}/permute")
        return build.reshape(value, wanted.shape, f"{like.name}/view")
