"""Compute the gradient of a convolution's weight in an op of its own, which knows a way that shares caches better.

Runs behind `channels_last`: the way is one for maps whose channels lie last.

Why: docs/decisions.md, "Kernels are chosen on the rank, not in the graph".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.builder import Builder, aten
from commfuse_fx.ir.core.edit import replace_all
from commfuse_fx.ir.core.meta import info, tensor_spec
from commfuse_fx.ir.core.program import Program
from commfuse_fx.ir.ops.memory_format import is_channels_last
from commfuse_fx.kernels.convolutions import convolution_weight_gradient
from commfuse_fx.kernels.winograd import tiles_pay
from commfuse_fx.passes.declaration import Pass, Situation

_INPUT, _WEIGHT, _BIAS = range(3)  # results of a convolution's backward


@dataclass(frozen=True)
class WeightGradients(Pass):
    """Gradients differ in their last digits: they are summed in another order.

    `at_least`: channels in and out. `kernel`: the largest, in pixels. `padding`: maps may grow by this part when they
    are padded, unless they are computed by tiles. Outside of these, oneDNN's kernel is as fast or faster.
    """

    name = "weight_gradients"
    numerics = "reordered"
    needs_sizes = True
    requires = ("simplified",)

    at_least: int = 32
    kernel: int = 9
    padding: float = 0.2

    @classmethod
    def when(cls, situation: Situation) -> WeightGradients | None:
        return cls() if situation.rewrites_kernels and torch.backends.mkldnn.is_available() else None

    def __call__(self, program: Program) -> bool:
        build = Builder(program)
        made: dict[fx.Node, fx.Node] = {}
        found = [node for node in program.graph.nodes if self._pays(node)]
        for node in found:
            made.update(_apart(build, node))
        replace_all(program, made)
        for old in made:
            program.graph.erase_node(old)
        for node in found:
            if not node.users:
                program.graph.erase_node(node)
        return bool(found)

    def _pays(self, node: fx.Node) -> bool:
        if node.target is not aten.convolution_backward.default:
            return False
        args: Any = node.args
        grad, given, weight = map(tensor_spec, args[:3])
        _, stride, padding, dilation, transposed, _, groups, mask = args[3:]
        if transposed or groups != 1 or not mask[_WEIGHT] or len(weight.shape) != 4:
            return False
        if any(length != 1 for length in (*stride, *dilation)):
            return False
        if grad.dtype != torch.float32 or grad.device != "cpu" or not all(map(is_channels_last, (grad, given))):
            return False
        if min(weight.shape[:2]) < self.at_least or not 1 < prod(weight.shape[2:]) <= self.kernel:
            return False
        if tiles_pay(grad.shape, weight.shape):
            return True
        padded = prod(size + 2 * by for size, by in zip(given.shape[2:], _for_both(padding), strict=True))
        return bool(padded <= (1 + self.padding) * prod(grad.shape[2:]))


def _apart(build: Builder, node: fx.Node) -> dict[fx.Node, fx.Node]:
    """Take the gradients of weight and bias out of a convolution's backward. Returns what replaces its results.

    Each is computed where its result stood: gradients are communicated in the order of the graph, and a rank whose
    batch does not pay keeps its convolution whole.
    """
    args: Any = node.args
    grad, given, weight = args[:3]
    padding = _for_both(args[5])
    like = info(node)
    made: dict[fx.Node, fx.Node] = {}
    for old in node.users:
        spec = tensor_spec(old)
        calls: dict[Any, tuple[str, Any, tuple[Any, ...]]] = {
            _WEIGHT: ("weight", convolution_weight_gradient, (grad, given, weight, padding, list(spec.stride))),
            _BIAS: ("bias", aten.sum.dim_IntList, (grad, [0, 2, 3])),
        }
        if (call := calls.get(old.args[1])) is not None:
            what, target, operands = call
            with build.after(old):
                made[old] = build.call(target, operands, spec=spec, like=info(old), name=f"{like.name}/{what}")
    assert isinstance(like.spec, tuple)
    like.spec = (like.spec[_INPUT], None, None)
    node.args = (*args[:10], [args[10][_INPUT], False, False])
    return made


def _for_both(lengths: Sequence[int]) -> list[int]:
    """A length for each dimension. Convolutions take one for both as well, such as the padding of `padding="valid"`."""
    return [*lengths] if len(lengths) == 2 else [*lengths] * 2
