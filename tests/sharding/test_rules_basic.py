"""Every strategy of the basic ops gives what the op gives: run on the parts of all ranks, and compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import commfuse_fx.sharding.rules  # noqa: F401  (registers the rules)
from commfuse_fx.ir.placement import P, R, S, take
from commfuse_fx.sharding.call import OpCall, Step, Strategy, call_of
from commfuse_fx.sharding.prove import check_call, check_strategy, describe
from commfuse_fx.sharding.rules.common import on_first
from commfuse_fx.sharding.rules.pointwise import pointwise_rule
from commfuse_fx.sharding.rules.registry import compute_strategies, find_rule
from commfuse_fx.sharding.rules.views import reshapings

aten = torch.ops.aten

Tensor = torch.Tensor


@dataclass(frozen=True)
class Case:
    """A call, and strategies that it must have; `without` must not be among them."""

    target: Any
    args: tuple[Any, ...]
    having: tuple[str, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        name = getattr(self.target, "__name__", self.target)
        return f"{name}({', '.join(_short(arg) for arg in self.args)})"


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return "x".join(map(str, value.shape)) or "scalar"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_short(item) for item in value) + "]"
    return str(value)


def case(target: Any, *args: Any, having: str, without: str = "", **kwargs: Any) -> Case:
    """`having`, `without`: strategies as `describe` writes them, with bars between."""
    return Case(target, args, _listed(having), kwargs, _listed(without))


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split("|") if part.strip())


def x(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def positive(*shape: int) -> Tensor:
    return x(*shape).abs() + 0.1


def mask(*shape: int) -> Tensor:
    return x(*shape) > 0


def ints(high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(high))


def z(*shape: int) -> Tensor:
    return torch.complex(x(*shape), x(*shape).flip(-1))


def pointwise_cases() -> Iterator[Case]:
    both = "S(0), S(0) -> S(0) | S(1), S(1) -> S(1) | S(1;3), S(1;3) -> S(1;3)"
    yield case(aten.add.Tensor, x(8, 24), x(8, 24), alpha=2, having=f"{both} | P, P -> P", without="P, R -> P")
    yield case(aten.add.Tensor, x(8, 24), 3, having="S(0) -> S(0)", without="P -> P")
    yield case(aten.add.Tensor, x(8, 24), x(24), having="S(0), R -> S(0) | S(1;2), S(0;2) -> S(1;2) | P, P -> P")
    yield case(aten.add.Tensor, x(8, 1), x(1, 24), having="S(0), R -> S(0) | R, S(1) -> S(1)")
    yield case(aten.sub.Tensor, x(8, 24), x(), having="S(0), R -> S(0) | P, P -> P", without="P, R -> P")
    yield case(aten.sub.Tensor, x(8, 24).t(), x(24, 8), having="S(0), S(0) -> S(0)")
    yield case(aten.rsub.Scalar, x(8, 24), 1.0, having="S(0) -> S(0)", without="P -> P")
    yield case(aten.rsub.Tensor, x(8, 24), x(8, 24), having=f"{both} | P, P -> P")
    yield case(
        aten.mul.Tensor, x(8, 24), x(8, 1), having="P, R -> P | R, P -> P | S(0), S(0) -> S(0)", without="P, P -> P"
    )
    yield case(aten.mul.Tensor, x(8, 24), 0.5, having="P -> P | S(1) -> S(1)")
    yield case(aten.mul.Tensor, ints(9, 8, 24), ints(9, 8, 24), having=both, without="P, R -> P")
    yield case(aten.mul.Scalar, x(8, 24), 0.5, having="P -> P")
    yield case(aten.div.Tensor, x(8, 24), positive(24), having="P, R -> P | S(1), S(0) -> S(1)", without="R, P -> P")
    yield case(aten.div.Scalar, x(8, 24), 3, having="P -> P")
    yield case(aten.div.Tensor_mode, x(8, 24), 3, rounding_mode="floor", having="S(0) -> S(0)", without="P -> P")
    for op in (aten.neg, aten.clone, aten.detach, aten.alias, aten.positive, aten.lift_fresh_copy):
        yield case(op.default, x(8, 24), having="P -> P | S(0) -> S(0) | S(1;3) -> S(1;3)")
    for op in (aten.real, aten.imag, aten._conj, aten.view_as_real):
        yield case(op.default, z(8, 24), having="P -> P | S(0) -> S(0) | S(1;2) -> S(1;2)")
    yield case(aten.complex.default, x(8, 24), x(8, 24), having=f"{both} | P, P -> P")
    yield case(aten.polar.default, positive(8, 24), x(8, 24), having=both, without="P, P -> P | P, R -> P")
    yield case(aten.clone.default, x(8, 4, 8, 8), memory_format=torch.channels_last, having="S(1) -> S(1) | P -> P")
    for op in (
        aten.relu,
        aten.gelu,
        aten.silu,
        aten.exp,
        aten.tanh,
        aten.sigmoid,
        aten.rsqrt,
        aten.hardswish,
        aten.erf,
    ):
        yield case(op.default, positive(8, 24), having="S(0) -> S(0) | S(1;2) -> S(1;2)", without="P -> P")
    for op in (aten.gelu_backward, aten.silu_backward, aten.tanh_backward, aten.sigmoid_backward):
        yield case(op.default, x(8, 24), x(8, 24), having=both, without="P, R -> P | P, P -> P")
    yield case(
        aten.threshold_backward.default, x(8, 24), x(8, 24), 0, having=f"P, R -> P | {both}", without="P, P -> P"
    )
    yield case(
        aten.native_dropout_backward.default, x(8, 24), mask(8, 24), 2.0, having="P, R -> P | S(0), S(0) -> S(0)"
    )
    yield case(
        aten.leaky_relu_backward.default, x(8, 24), x(8, 24), 0.1, False, having="P, R -> P", without="R, P -> P"
    )
    yield case(aten.hardtanh_backward.default, x(8, 24), x(8, 24), -1, 1, having="P, R -> P", without="R, P -> P")
    yield case(aten.elu_backward.default, x(8, 24), 1, 1, 1, False, x(8, 24), having=both)
    yield case(aten.softplus_backward.default, x(8, 24), x(8, 24), 1, 20, having=both)
    yield case(aten.log_sigmoid_forward.default, x(8, 24), having="S(0) -> S(0), S(0)")
    yield case(aten._prelu_kernel.default, x(8, 24), x(1, 24), having="S(0), R -> S(0) | S(1), S(1) -> S(1)")
    yield case(aten._prelu_kernel_backward.default, x(8, 24), x(8, 24), x(1, 24), having="S(0), S(0), R -> S(0), S(0)")
    yield case(aten.lerp.Scalar, x(8, 24), x(8, 24), 0.3, having="P, P -> P")
    yield case(aten.lerp.Tensor, x(8, 24), x(8, 24), x(24), having="P, P, R -> P | S(1), S(1), S(0) -> S(1)")
    yield case(aten.addcmul.default, x(8, 24), x(8, 24), x(24), value=2, having="P, P, R -> P | P, R, P -> P")
    yield case(aten.addcdiv.default, x(8, 24), x(8, 24), positive(24), having="P, P, R -> P", without="P, R, P -> P")
    yield case(aten.where.self, mask(8, 24), x(8, 24), x(), having="R, P, P -> P | S(0), S(0), R -> S(0)")
    yield case(aten.where.self, mask(8, 1), x(24), x(8, 24), having="R, S(0), S(1) -> S(1) | S(0), R, S(0) -> S(0)")
    yield case(aten.where.ScalarOther, mask(8, 24), x(8, 24), 0.0, having="R, P -> P | S(0), S(0) -> S(0)")
    yield case(aten.where.ScalarOther, mask(8, 24), x(8, 24), 1.0, having="S(0), S(0) -> S(0)", without="R, P -> P")
    yield case(aten.where.ScalarSelf, mask(8, 24), 0, x(8, 24), having="R, P -> P")
    yield case(aten.where.Scalar, mask(8, 24), 0, 1, having="S(0) -> S(0)")
    yield case(aten.masked_fill.Scalar, x(8, 24), mask(24), 0, having="P, R -> P | S(1), S(0) -> S(1)")
    yield case(aten.masked_fill.Scalar, x(8, 24), mask(8, 24), -1e9, having=both, without="P, R -> P")
    yield case(aten.masked_fill.Tensor, x(8, 24), mask(8, 1), x(), having="S(0), S(0), R -> S(0)")
    yield case(aten._to_copy.default, x(8, 24), dtype=torch.float32, having="S(0) -> S(0)", without="P -> P")
    yield case(aten._to_copy.default, x(8, 24, dtype=torch.float32), dtype=torch.float64, having="P -> P")
    yield case(aten._to_copy.default, mask(8, 24), dtype=torch.float32, having="S(0) -> S(0)", without="P -> P")
    yield case(aten._to_copy.default, x(8, 24), dtype=torch.int64, having="S(0) -> S(0)", without="P -> P")
    yield case(aten.copy.default, x(8, 24), x(24), having="R, P -> P | S(1), S(0) -> S(1)")
    yield case(aten.fill.Scalar, x(8, 24), 2, having="S(0) -> S(0)", without="P -> P")
    yield case(aten.pow.Tensor_Scalar, x(8, 24), 2, having="S(0) -> S(0)", without="P -> P")
    yield case(aten.eq.Tensor, ints(3, 8, 24), ints(3, 8, 1), having="S(0), S(0) -> S(0) | S(1), R -> S(1)")
    yield case(aten.bitwise_and.Tensor, mask(8, 1), mask(24), having="R, S(0) -> S(1) | S(0), R -> S(0)")
    yield case(aten.logical_not.default, mask(8, 24), having="S(0) -> S(0)")
    yield case(aten.clamp.Tensor, x(8, 24), x(24), x(8, 1), having="S(1), S(0), R -> S(1)")
    yield case(aten.frexp.Tensor, x(8, 24), having="S(1) -> S(1), S(1)")
    yield case(aten.bucketize.Tensor, x(8, 24), torch.tensor([-1.0, 0.0, 1.0]), having="S(0), R -> S(0)")
    yield case(aten.isin.Tensor_Tensor, ints(9, 8, 24), ints(9, 4), having="S(1), R -> S(1)")
    yield case(aten.glu.default, x(8, 48), 1, having="S(0) -> S(0) | S(1;2) -> S(1) | S(1;6) -> S(1;3)")
    yield case(aten.glu_backward.default, x(8, 24), x(8, 48), 1, having="S(1), S(1;2) -> S(1;2) | S(0), S(0) -> S(0)")
    yield case(aten.mul.Tensor, x(0, 8), x(0, 8), having="S(1), S(1) -> S(1)")


def view_cases() -> Iterator[Case]:
    for op in (aten.view, aten._unsafe_view, aten.reshape, aten.view_copy):
        yield case(op.default, x(8, 24), [8, 3, 8], having="S(0) -> S(0) | S(1;3) -> S(2) | P -> P")
    yield case(aten.view.default, x(8, 24), [-1], having="S(0) -> S(0) | S(1) -> S(0;8) | S(0;2) -> S(0;2)")
    yield case(aten.view.default, x(8, 4, 6), [32, -1], having="S(0) -> S(0) | S(1) -> S(0;8)")
    yield case(aten.view.default, x(32, 6), [8, 4, 6], having="S(0) -> S(0) | S(0;8) -> S(1)")
    yield case(aten.view.default, x(1, 8, 24), [8, 1, 24, 1], having="S(1) -> S(0) | S(2;3) -> S(2;3)")
    yield case(aten.view.default, x(8, 24), [2, 4, 4, 6], having="S(0;2) -> S(1) | S(1) -> S(2)")
    yield case(aten.view.default, x(8, 24), [24, 8], having="S(0) -> S(0)")
    yield case(aten.view.default, x(24, 8).t().contiguous(), [192], having="S(0) -> S(0)")
    yield case(aten.view.default, x(8), [8], having="S(0) -> S(0)")
    yield case(aten.view.default, x(1), [], having="P -> P")
    yield case(aten.view.default, x(0, 8), [8, 0], having="P -> P")
    yield case(aten._reshape_alias.default, x(8, 24), [8, 3, 8], [24, 8, 1], having="S(1;3) -> S(2)")
    yield case(aten.view.dtype, x(8, 24, dtype=torch.float32), torch.int32, having="S(1) -> S(1)", without="P -> P")
    yield case(aten.view.dtype, x(8, 24), torch.float32, having="S(0) -> S(0)", without="S(1) -> S(1)")
    yield case(aten.view_as_complex.default, x(8, 24, 2), having="S(1) -> S(1) | P -> P")
    yield case(aten.expand.default, x(8, 1, 24), [8, 8, -1], having="S(0) -> S(0) | R -> S(1) | S(2;3) -> S(2;3)")
    yield case(aten.expand.default, x(24), [8, 24], having="R -> S(0) | S(0) -> S(1) | P -> P")
    yield case(aten.expand.default, x(), [8], having="R -> S(0) | P -> P")
    yield case(aten.t.default, x(8, 24), having="S(0) -> S(1) | S(1;3) -> S(0;3) | P -> P")
    yield case(aten.t.default, x(8), having="S(0) -> S(0)")
    yield case(aten.transpose.int, x(8, 24, 4), 0, -1, having="S(0) -> S(2) | S(2) -> S(0) | S(1) -> S(1) | P -> P")
    yield case(aten.permute.default, x(8, 24, 4), [2, 0, -2], having="S(0) -> S(1) | S(1) -> S(2) | S(2) -> S(0)")
    yield case(aten.movedim.int, x(8, 24, 4), 0, 2, having="S(0) -> S(2) | S(1) -> S(0) | S(2) -> S(1)")
    yield case(aten.movedim.intlist, x(8, 24, 4), [0, 1], [-1, 0], having="S(0) -> S(2) | S(1) -> S(0)")
    yield case(aten.squeeze.default, x(4, 1, 24, 1), having="S(0) -> S(0) | S(2) -> S(1) | P -> P")
    yield case(aten.squeeze.dim, x(4, 1, 24), 1, having="S(0) -> S(0) | S(2) -> S(1)")
    yield case(aten.squeeze.dim, x(4, 1, 24), 0, having="S(0) -> S(0) | S(2) -> S(2)")
    yield case(aten.squeeze.dims, x(4, 1, 24, 1), [-1, 0], having="S(0) -> S(0) | S(2) -> S(2)")
    yield case(aten.unsqueeze.default, x(8, 24), -1, having="S(1) -> S(1) | P -> P")
    yield case(aten.unsqueeze.default, x(8, 24), 0, having="S(0) -> S(1) | S(1;3) -> S(2;3)")
    yield case(aten.unfold.default, x(8, 4, 24), 1, 2, 1, having="S(0) -> S(0) | S(2) -> S(2) | P -> P")
    yield case(aten.unfold_backward.default, x(8, 3, 24, 2), [8, 4, 24], 1, 2, 1, having="S(0) -> S(0) | S(2) -> S(2)")
    yield case(aten.diagonal.default, x(5, 8, 6, 24), 1, 0, 2, having="S(1) -> S(0) | S(3) -> S(1) | P -> P")
    yield case(aten.diagonal_backward.default, x(8, 5), [5, 8, 6], 1, 0, 2, having="S(0) -> S(1) | P -> P")


def slicing_cases() -> Iterator[Case]:
    end = 2**63 - 1
    yield case(
        aten.select.int, x(8, 5, 24), 1, -1, having="S(0) -> S(0) | S(2) -> S(1) | P -> P", without="S(1) -> S(1)"
    )
    yield case(aten.select_backward.default, x(8, 24), [8, 5, 24], 1, 2, having="S(0) -> S(0) | S(1) -> S(2) | P -> P")
    yield case(aten.select_scatter.default, x(8, 5, 24), x(8, 24), 1, 2, having="S(2), S(1) -> S(2) | P, P -> P")
    yield case(aten.slice.Tensor, x(8, 24), 1, 0, end, having="S(1) -> S(1) | S(1;3) -> S(1;3) | S(0) -> S(0) | P -> P")
    yield case(
        aten.slice.Tensor, x(8, 24), 1, 8, 16, having="S(1;3) -> S(1) | S(1;6) -> S(1;2)", without="S(1) -> S(1)"
    )
    yield case(aten.slice.Tensor, x(8, 24), -1, -8, end, having="S(1;3) -> S(1) | S(0) -> S(0)")
    yield case(aten.slice.Tensor, x(8, 24), 1, 0, -1, having="S(0) -> S(0)", without="S(1) -> S(1)")
    yield case(aten.slice.Tensor, x(8, 24), 1, 0, end, 2, having="S(0) -> S(0)", without="S(1) -> S(1)")
    yield case(aten.slice.Tensor, x(8, 24), 0, 3, 3, having="S(1) -> S(1)")
    yield case(aten.slice.Tensor, x(8, 24), having="S(0) -> S(0)")
    yield case(aten.narrow.default, x(8, 24), 1, 16, 8, having="S(1;3) -> S(1) | S(0) -> S(0) | P -> P")
    yield case(
        aten.slice_backward.default, x(8, 8), [8, 24], 1, 8, 16, 1, having="S(1) -> S(1;3) | S(0) -> S(0) | P -> P"
    )
    yield case(aten.slice_backward.default, x(8, 24), [8, 24], 1, 0, end, 1, having="S(1) -> S(1) | S(0) -> S(0)")
    yield case(aten.slice_backward.default, x(8, 12), [8, 24], 1, 0, end, 2, having="S(0) -> S(0)")
    yield case(aten.slice_scatter.default, x(8, 24), x(8, 8), 1, 8, 16, having="S(1;3), S(1) -> S(1;3) | P, P -> P")
    yield case(
        aten.split.Tensor, x(8, 24), 8, 1, having="S(1;3) -> S(1), S(1), S(1) | S(0;2) -> S(0;2), S(0;2), S(0;2)"
    )
    yield case(aten.split.Tensor, x(8, 24), 16, 1, having="S(1;3) -> S(1;2), S(1) | P -> P, P")
    yield case(aten.split_with_sizes.default, x(8, 32), [16, 8, 8], 1, having="S(1;4) -> S(1;2), S(1), S(1)")
    yield case(aten.split_with_sizes.default, x(8, 24), [5, 19], -1, having="S(0) -> S(0), S(0)")
    yield case(aten.split_with_sizes.default, x(8, 24), [4, 4], having="S(0;2) -> S(0), S(0) | S(1) -> S(1), S(1)")
    yield case(aten.split_with_sizes_copy.default, x(8, 24), [4, 4], having="S(0;2) -> S(0), S(0)")
    yield case(aten.chunk.default, x(8, 24), 3, 1, having="S(1;3) -> S(1), S(1), S(1) | P -> P, P, P")
    yield case(aten.unbind.int, x(3, 8, 24), having="S(1) -> S(0), S(0), S(0) | P -> P, P, P")


def joining_cases() -> Iterator[Case]:
    yield case(aten.cat.default, [x(8, 8)] * 3, 1, having="S(1), S(1), S(1) -> S(1;3) | P, P, P -> P")
    yield case(aten.cat.default, [x(8, 16), x(8, 8)], -1, having="S(1;2), S(1) -> S(1;3) | S(0), S(0) -> S(0)")
    yield case(aten.cat.default, [x(0), x(8, 8), x(8, 8)], having="R, S(1), S(1) -> S(1) | R, S(0), S(0) -> S(0;2)")
    yield case(aten.cat.default, [ints(4, 8, 5), ints(4, 8, 6)], 1, having="S(0), S(0) -> S(0)", without="P, P -> P")
    yield case(
        aten.stack.default, [x(8, 24), x(8, 24)], 1, having="S(0), S(0) -> S(0) | S(1), S(1) -> S(2) | P, P -> P"
    )
    yield case(aten.flip.default, x(8, 24), [-1], having="S(0) -> S(0) | P -> P", without="S(1) -> S(1)")
    yield case(aten.roll.default, x(8, 24), [1], [1], having="S(0) -> S(0) | P -> P", without="S(1) -> S(1)")
    yield case(aten.roll.default, x(8, 24), [1], having="P -> P", without="S(0) -> S(0)")
    yield case(aten.repeat.default, x(8, 24), [1, 3], having="S(0) -> S(0) | S(1) -> S(1;3) | P -> P")
    yield case(aten.repeat.default, x(24), [8, 2], having="R -> S(0) | S(0) -> S(1;2) | R -> S(0;2)")
    yield case(aten.repeat_interleave.self_int, x(8, 24), 3, 1, having="S(1) -> S(1) | S(0) -> S(0) | P -> P")
    yield case(aten.repeat_interleave.self_int, x(24), 3, output_size=72, having="S(0) -> S(0)")
    yield case(aten.constant_pad_nd.default, x(8, 24), [1, 2], having="S(0) -> S(0) | P -> P", without="S(1) -> S(1)")
    yield case(aten.constant_pad_nd.default, x(8, 24), [0, 0, 2, 2], 1.0, having="S(1) -> S(1)", without="P -> P")
    yield case(aten.tril.default, x(8, 6, 6), having="S(0) -> S(0) | P -> P", without="S(1) -> S(1)")
    yield case(aten.triu.default, x(8, 6, 6), 1, having="S(0;2) -> S(0;2) | P -> P", without="S(2) -> S(2)")


def matmul_cases() -> Iterator[Case]:
    mm = "S(0), R -> S(0) | R, S(1;3) -> S(1;3) | S(1), S(0) -> P | S(1;3), S(0;3) -> P | P, R -> P | R, P -> P"
    yield case(aten.mm.default, x(8, 24), x(24, 24), having=mm, without="P, P -> P")
    yield case(aten.mm.default, x(24, 8).t(), x(24, 24).t(), having=mm)
    yield case(aten.mm.default, ints(5, 8, 24), ints(5, 24, 8), having="S(0), R -> S(0)", without="S(1), S(0) -> P")
    addmm = "S(0), R, S(1) -> S(1) | R, S(0), R -> S(0) | R, S(1), S(0) -> P | P, S(1), S(0) -> P | R, P, R -> P"
    yield case(aten.addmm.default, x(24), x(8, 24), x(24, 24), having=addmm)
    yield case(aten.addmm.default, x(24), x(8, 24), x(24, 24), beta=2, alpha=3, having=addmm)
    yield case(aten.addmm.default, x(8, 24), x(8, 24), x(24, 24), having="S(0), S(0), R -> S(0) | P, R, P -> P")
    yield case(aten.addmm.default, x(8, 1), x(8, 24), x(24, 24), having="S(0), S(0), R -> S(0) | R, R, S(1) -> S(1)")
    yield case(
        aten.bmm.default, x(8, 4, 24), x(8, 24, 12), having="S(0), S(0) -> S(0) | S(1), R -> S(1) | S(2), S(1) -> P"
    )
    yield case(
        aten.baddbmm.default, x(1, 12), x(8, 4, 24), x(8, 24, 12), having="R, S(0), S(0) -> S(0) | R, S(2), S(1) -> P"
    )
    yield case(aten.mv.default, x(8, 24), x(24), having="S(0), R -> S(0) | S(1), S(0) -> P | P, R -> P")
    yield case(aten.addmv.default, x(8), x(8, 24), x(24), beta=2, having="S(0), S(0), R -> S(0) | R, S(1), S(0) -> P")
    yield case(aten.dot.default, x(24), x(24), having="S(0;3), S(0;3) -> P | P, R -> P | R, P -> P")
    yield case(aten.vdot.default, z(24), z(24), having="S(0), S(0) -> P | P, R -> P | R, P -> P")
    yield case(
        aten.matmul.default, x(8, 1, 4, 24), x(4, 24, 12), having="S(0), R -> S(0) | R, S(0) -> S(1) | S(3), S(1) -> P"
    )
    yield case(aten.matmul.default, x(24), x(8, 24, 12), having="R, S(0) -> S(0) | R, S(2) -> S(1) | S(0), S(1) -> P")
    yield case(aten.matmul.default, x(8, 4, 24), x(24), having="S(1), R -> S(1) | S(2), S(0) -> P")
    yield case(aten.matmul.default, x(24), x(24), having="S(0), S(0) -> P")
    yield case(
        aten.linear.default, x(8, 4, 24), x(12, 24), having="S(1), R -> S(1) | R, S(0) -> S(2) | S(2), S(1) -> P"
    )
    yield case(aten.linear.default, x(8, 24), x(12, 24), x(12), having="R, S(0), S(0) -> S(1) | S(1), S(1), R -> P")


def reduction_cases() -> Iterator[Case]:
    yield case(aten.sum.default, x(8, 24), having="S(0) -> P | S(1;3) -> P | P -> P")
    yield case(aten.sum.default, mask(8, 24), having="S(0) -> R", without="P -> P | S(0) -> P")
    yield case(aten.sum.default, x(), having="P -> P")
    yield case(aten.sum.dim_IntList, x(8, 4, 24), [0, -1], having="S(0) -> P | S(1) -> S(0) | S(2) -> P | P -> P")
    yield case(aten.sum.dim_IntList, x(8, 4, 24), [1], True, having="S(0) -> S(0) | S(1) -> P | S(2;3) -> S(2;3)")
    yield case(aten.sum.dim_IntList, x(8, 24), [], having="S(0) -> P")
    yield case(aten.sum.dim_IntList, x(8, 24), None, True, having="S(0) -> P")
    yield case(aten.sum.dim_IntList, ints(9, 8, 24), [0], dtype=torch.float64, having="S(0) -> P", without="P -> P")
    yield case(aten.mean.default, x(8, 24), having="S(0) -> P | S(1) -> P | P -> P")
    yield case(aten.mean.dim, x(8, 4, 24), [-1, 0], having="S(0) -> P | S(1) -> S(0) | S(2) -> P | P -> P")
    yield case(aten.mean.dim, x(8, 24), [-1], True, having="S(0) -> S(0) | S(1;3) -> P")
    yield case(aten.count_nonzero.dim_IntList, mask(8, 24), [1], having="S(0) -> S(0) | S(1) -> R")
    yield case(aten.amax.default, x(8, 24), [-1], True, having="S(0) -> S(0) | S(1) -> R", without="P -> P")
    yield case(aten.amax.default, ints(99, 8, 24), having="S(0) -> R | S(1) -> R")
    yield case(aten.amin.default, x(8, 24), [0], having="S(0) -> R | S(1) -> S(0)")
    yield case(aten.amin.default, ints(99, 8, 24), [0], having="S(1) -> S(0)", without="S(0) -> R")
    yield case(aten.max.default, x(8, 24), having="S(0) -> R")
    yield case(aten.min.default, x(8, 24), having="S(1) -> R")
    yield case(aten.max.dim, x(8, 24), 1, having="S(0) -> S(0), S(0)", without="S(1) -> R, R")
    yield case(aten.min.dim, x(8, 24), 0, True, having="S(1) -> S(1), S(1)")
    yield case(aten.argmax.default, x(8, 24), -1, having="S(0) -> S(0)", without="S(1) -> R")
    yield case(aten.argmin.default, x(8, 4, 24), 0, True, having="S(1) -> S(1) | S(2) -> S(2)")
    yield case(aten.any.default, mask(8, 24), having="S(0) -> R | S(1) -> R")
    yield case(aten.any.dim, ints(40, 8, 24) == 7, 1, having="S(0) -> S(0) | S(1) -> R")
    yield case(aten.all.dim, ints(40, 8, 24) != 7, 1, True, having="S(0) -> S(0) | S(1) -> R")
    yield case(aten.all.dims, ints(40, 8, 4, 24) != 7, [0, 1], having="S(0) -> R | S(2) -> S(0)")
    yield case(aten.all.default, torch.ones(8, dtype=torch.uint8), having="R -> R")
    yield case(aten.prod.dim_int, x(8, 24), 1, having="S(0) -> S(0)", without="S(1) -> P")
    yield case(aten.var.correction, x(8, 4, 24), [1, 2], correction=0, having="S(0) -> S(0)", without="P -> P")
    yield case(aten.std.dim, x(8, 24), [0], True, True, having="S(1) -> S(1)")
    yield case(aten.var_mean.correction, x(8, 24), [1], correction=1, keepdim=True, having="S(0) -> S(0), S(0)")
    yield case(aten.logsumexp.default, x(8, 24), [1], having="S(0) -> S(0)", without="P -> P")
    yield case(aten.median.dim, x(8, 24), 1, having="S(0) -> S(0), S(0)")
    yield case(aten.linalg_vector_norm.default, x(8, 24), having="S(0) -> R | S(1;3) -> R", without="P -> P")
    yield case(aten.linalg_vector_norm.default, x(8, 24), 2, [1], True, having="S(0) -> S(0) | S(1) -> R")
    yield case(aten.linalg_vector_norm.default, x(8, 24), 1, having="S(0) -> P")
    yield case(aten.linalg_vector_norm.default, x(8, 24), float("inf"), having="S(0) -> R")
    yield case(aten.linalg_vector_norm.default, x(8, 24), 3, [0], having="S(1) -> S(0)", without="S(0) -> R")
    yield case(aten.norm.Scalar, x(8, 24), having="S(0) -> R")
    yield case(aten.norm.ScalarOpt_dim, x(8, 24), None, [1], having="S(0) -> S(0) | S(1) -> R")
    yield case(aten.histc.default, x(8, 24), 4, -1, 1, having="S(0) -> P | S(1) -> P", without="P -> P")
    yield case(aten.histc.default, x(8, 24), 4, having="R -> R", without="S(0) -> P")
    yield case(aten.cumsum.default, x(8, 24), -1, having="S(0) -> S(0) | P -> P", without="S(1) -> S(1)")
    yield case(aten.cumprod.default, x(8, 24), 0, having="S(1) -> S(1)", without="P -> P")
    yield case(aten.logcumsumexp.default, x(8, 24), 0, having="S(1) -> S(1)")
    yield case(aten.sort.default, x(8, 24), -1, True, having="S(0) -> S(0), S(0)", without="S(1) -> S(1), S(1)")
    yield case(aten.sort.stable, ints(4, 8, 24), stable=True, dim=0, having="S(1) -> S(1), S(1)")
    yield case(aten.argsort.default, x(8, 24), having="S(0) -> S(0)")
    yield case(aten.topk.default, x(8, 24), 2, having="S(0) -> S(0), S(0)")


def indexing_cases() -> Iterator[Case]:
    dense = "S(0), S(0) -> S(0) | R, S(1) -> S(1) | S(1), R -> P | P, R -> P"
    yield case(aten.gather.default, x(8, 24), 1, ints(24, 8, 8), having=dense, without="S(1), S(1) -> S(1)")
    yield case(aten.gather.default, x(8, 24), 0, ints(8, 8, 4), having="R, S(0) -> S(0)", without="S(1), S(1) -> S(1)")
    yield case(aten.gather.default, x(8, 24, dtype=torch.float32), -1, ints(24, 8, 1), having="S(1), R -> P")
    yield case(
        aten.index_select.default, x(8, 24), 1, ints(24, 12), having="S(0), R -> S(0) | R, S(0) -> S(1) | P, R -> P"
    )
    scatter = "S(0), S(0), S(0) -> S(0)"
    yield case(
        aten.scatter.src,
        x(8, 24),
        1,
        ints(24, 8, 1),
        x(8, 1),
        having=scatter,
        without="S(1), S(1), S(1) -> S(1) | P, R, P -> P",
    )
    yield case(aten.scatter.value, x(8, 24), 1, ints(24, 8, 1), 1.0, having="S(0), S(0) -> S(0)", without="P, R -> P")
    yield case(aten.scatter.value, x(8, 24), 1, ints(24, 8, 1), 0.0, having="P, R -> P")
    yield case(
        aten.scatter_add.default,
        *(x(8, 24), 1, ints(24, 8, 12), x(8, 12)),
        having=f"{scatter} | P, R, P -> P | R, R, P -> P | P, S(1), S(1) -> P | R, S(1), S(1) -> P",
    )
    yield case(
        aten.scatter_add.default,
        *(x(8, 24), 1, ints(24, 8, 12), x(8, 12)),
        having="S(1), R, R -> S(1)",
    )
    yield case(aten.scatter_add.default, x(8, 24), 1, ints(24, 4, 8), x(8, 12), having="P, R, P -> P")
    yield case(aten.scatter_reduce.two, x(8, 24), 1, ints(24, 8, 4), x(8, 4), "amax", having="S(0), S(0), S(0) -> S(0)")
    rows = "S(1), R, S(1) -> S(1) | P, S(0), S(0) -> P | R, S(0), S(0) -> P | R, R, P -> P | P, R, P -> P"
    yield case(aten.index_add.default, x(24, 8), 0, ints(24, 12), x(12, 8), alpha=2, having=rows)
    yield case(aten.index_copy.default, x(24, 8), 0, torch.arange(12), x(12, 8), having="S(1), R, S(1) -> S(1)")
    yield case(aten.index_fill.int_Scalar, x(24, 8), 0, ints(24, 12), 1.0, having="S(1), R -> S(1)")
    for op in (aten.index, aten._unsafe_index):
        yield case(
            op.Tensor,
            *(x(24, 8), [ints(24, 8, 4, low=-24)]),
            having="S(1), R -> S(2) | R, S(0) -> S(0) | R, S(1) -> S(1) | S(0), R -> P | P, R -> P",
        )
    yield case(
        aten.index.Tensor, x(8, 24, 4), [None, ints(24, 8)], having="S(0), R -> S(0) | S(1), R -> P | R, S(0) -> S(1)"
    )
    yield case(
        aten.index.Tensor, x(6, 5, 8), [ints(6, 8, 1), ints(5, 4)], having="S(2), R, R -> S(2) | R, S(0), R -> S(0)"
    )
    yield case(
        aten.index.Tensor,
        x(6, 8, 5),
        [ints(6, 12), None, ints(5, 12)],
        having="S(1), R, R -> S(1) | R, S(0), S(0) -> S(0)",
    )
    yield case(aten.index.Tensor, x(8, 24), [mask(8)], having="P, R -> P", without="S(1), R -> S(1)")
    puts = "S(1), R, S(2) -> S(1) | P, R, P -> P | R, S(0), S(0) -> P | P, S(1), S(1) -> P | R, R, P -> P"
    for op in (aten.index_put, aten._unsafe_index_put):
        yield case(
            op.default, x(24, 8), [ints(24, 8, 4, low=-24)], x(8, 4, 8), True, having=f"{puts} | S(0), R, R -> S(0)"
        )
    yield case(
        aten.index_put.default,
        x(24, 8),
        [torch.arange(8)],
        x(8, 8),
        having="S(1), R, S(1) -> S(1)",
        without="R, S(0), S(0) -> P | P, R, P -> P",
    )
    yield case(
        aten.index_put.default, x(24, 8), [None, ints(8, 4)], x(), True, having="S(0), R, R -> S(0) | R, S(0), R -> P"
    )
    yield case(
        aten.index_put.default,
        x(6, 8, 5),
        [ints(6, 8), None, ints(5, 8)],
        x(8, 1),
        True,
        having="S(1), R, R, R -> S(1) | P, S(0), S(0), S(0) -> P",
    )


def factory_cases() -> Iterator[Case]:
    for op in (aten.zeros_like, aten.ones_like):
        yield case(op.default, x(8, 24), having="P -> R | S(1;3) -> S(1;3)", without="P -> P")
    yield case(aten.full_like.default, x(8, 24), 2, dtype=torch.int64, having="P -> R | S(0) -> S(0)")
    yield case(aten.new_zeros.default, x(8, 24), [8, 5], having="P -> R | S(0) -> R | S(1;3) -> R | R -> S(0)")
    yield case(aten.new_zeros.default, x(8, 24), [8, 24], having="S(0) -> S(0)")
    yield case(aten.new_full.default, x(8, 24), [24], 3, having="S(1) -> R | R -> S(0)")
    yield case(aten.new_ones.default, x(8), [], having="S(0) -> R")
    yield case(on_first, x(8, 24), 0, having="S(0) -> S(0) | P -> P")


CASES = [
    each
    for cases in (
        pointwise_cases,
        view_cases,
        slicing_cases,
        joining_cases,
        matmul_cases,
        reduction_cases,
        indexing_cases,
        factory_cases,
    )
    for each in cases()
]


@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("one", CASES, ids=[f"{i}-{one.id}" for i, one in enumerate(CASES)])
def test_every_strategy_gives_what_the_op_gives(one: Case, ways: int) -> None:
    call, tensors = call_of(one.target, one.args, one.kwargs, ways)
    wide = all(tensor.dtype != torch.float32 for tensor in tensors) and one.kwargs.get("dtype") != torch.float32
    tolerance = 1e-10 if wide else 1e-5
    assert check_call(call, tensors, tolerance, tolerance) == []
    found = [describe(strategy) for strategy in compute_strategies(call)]
    expected = [each for each in one.having if _divides(each, call)]
    assert not [each for each in expected if each not in found], found
    assert not [each for each in one.without if each in found]
    if ways == 2:
        assert expected == list(one.having)


def _divides(text: str, call: OpCall) -> bool:
    """Whether all sizes are large enough for a strategy that is written out."""
    inputs, outputs = (part.split(", ") for part in text.split(" -> "))
    pairs = [*zip(inputs, call.inputs, strict=True), *zip(outputs, call.outputs, strict=True)]
    for placed, spec in pairs:
        if placed.startswith("S"):
            dim, _, blocks = placed[2:-1].partition(";")
            if spec is None or spec.shape[int(dim)] % (call.ways * int(blocks or 1)):
                return False
    return True


shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=1, max_size=4)


@st.composite
def shape_pairs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of equally many elements: the factors of one, put together in other groups."""
    before = draw(shapes)
    factors = [factor for size in before for factor in _primes(size)]
    if draw(st.booleans()):
        factors = draw(st.permutations(factors))
    cuts = sorted(draw(st.lists(st.integers(0, len(factors)), max_size=4)))
    bounds = zip([0, *cuts], [*cuts, len(factors)], strict=True)
    return before, [prod(factors[begin:end]) for begin, end in bounds]


def _primes(size: int) -> list[int]:
    for factor in (2, 3):
        if size % factor == 0:
            return [factor, *_primes(size // factor)]
    return []


@settings(max_examples=150, deadline=None, derandomize=True)
@given(shape_pairs(), st.sampled_from([2, 3, 4]))
def test_parts_of_any_view_are_views_of_parts(pair: tuple[list[int], list[int]], ways: int) -> None:
    before, after = pair
    call, tensors = call_of(aten.view.default, (torch.arange(float(prod(before))).view(before), after), ways=ways)
    assert check_call(call, tensors) == []
    # Whatever parts hold the same elements in both shapes is found.
    found = reshapings(before, after, ways, (1, 2, 3))
    flat = torch.arange(prod(before))
    for one in _shards(before, ways):
        for other in _shards(after, ways):
            same = torch.equal(_part(flat.view(before), one, ways), _part(flat.view(after), other, ways))
            assert same == ((one, other) in found)


def _shards(shape: list[int], ways: int) -> list[Any]:
    return [S(dim, n) for dim, size in enumerate(shape) for n in (1, 2, 3) if size % (ways * n) == 0]


def _part(tensor: Tensor, placement: Any, ways: int) -> Tensor:
    return take(tensor, placement, ways, ways - 1).flatten()


def test_a_wrong_strategy_is_caught() -> None:
    call, tensors = call_of(aten.relu.default, (x(8, 24),))
    assert "is off by" in check_strategy(call, Strategy((P,), (P,)), tensors)
    call, tensors = call_of(aten.addmm.default, (x(24), x(8, 24), x(24, 24)))
    assert "is off by" in check_strategy(call, Strategy((P,), (R, S(1), S(0))), tensors)
    call, tensors = call_of(aten.view.default, (x(8, 24), [8, 3, 8]))
    assert "raises" in check_strategy(call, Strategy((S(2),), (S(1),)), tensors)


@pytest.mark.parametrize(
    "target, args, blocks, expected",
    [
        (aten.relu.default, (x(8, 24),), 4, "S(0;4) -> S(0;4)"),
        (aten.mm.default, (x(48, 8), x(8, 8)), 8, "S(0;8), R -> S(0;8)"),
        (aten.view.default, (x(8, 6, 4), [48, 4]), 1, "S(1) -> S(0;8)"),
        (aten.view.default, (x(48, 4), [8, 6, 4]), 8, "S(0;8) -> S(1)"),
        (aten.split.Tensor, (x(8, 48), 16, 1), 6, "S(1;6) -> S(1;2), S(1;2), S(1;2)"),
        (aten.slice.Tensor, (x(8, 48), 1, 0, 32), 6, "S(1;6) -> S(1;4)"),
        (aten.slice_backward.default, (x(8, 32), [8, 48], 1, 0, 32, 1), 4, "S(1;4) -> S(1;6)"),
        (aten.cat.default, ([x(8, 32), x(8, 16)], 1), 4, "S(1;4), S(1;2) -> S(1;6)"),
        (aten.glu.default, (x(8, 48), 1), 4, "S(1;4) -> S(1;2)"),
    ],
)
def test_numbers_of_blocks_come_from_the_call(target: Any, args: tuple[Any, ...], blocks: int, expected: str) -> None:
    call, tensors = call_of(target, args)
    call = replace(call, blocks=(1, blocks))
    assert expected in [describe(strategy) for strategy in compute_strategies(call)]
    assert check_call(call, tensors) == []


def test_steps_are_ops_with_rules() -> None:
    """So that what one axis of a mesh has divided can be divided along the next."""
    calls = [call_of(one.target, one.args, one.kwargs)[0] for one in CASES]
    targets = [
        step.target
        for call in calls
        for strategy in compute_strategies(call)
        for step in strategy.steps
        if isinstance(step, Step)
    ]
    assert len(set(targets)) > 30
    assert [target for target in dict.fromkeys(targets) if find_rule(target) is None] == []


def test_ops_that_write_or_draw_are_not_taken_for_pointwise() -> None:
    for target in (aten.add_.Tensor, aten.relu_.default, aten.add.out, aten._foreach_add.List, aten.uniform.default):
        assert pointwise_rule(target) is None
    assert pointwise_rule(aten.cosh.default) is not None


def test_every_tagged_op_has_strategies_that_hold() -> None:
    """Whatever PyTorch tags as pointwise and takes one to three tensors of numbers in (0.1, 0.9)."""
    values = [torch.linspace(0.1, 0.9, size, dtype=torch.float64) for size in (32, 8, 4)]
    tensors = (values[0].view(4, 8), values[1], values[2].view(4, 1))
    checked = {1: 0, 2: 0, 3: 0}
    for target in _tagged():
        required = [argument for argument in target._schema.arguments if not argument.has_default_value()]
        if not all(str(argument.type) == "Tensor" for argument in required):
            continue
        try:
            call, taken = call_of(target, tensors[: len(required)])
        except RuntimeError:  # an op on integers, or one that does not broadcast
            continue
        assert check_call(call, taken, 1e-12, 1e-12) == []
        ways = {describe(strategy) for strategy in compute_strategies(call)}
        outputs = ", ".join(["S(1)"] * len(call.outputs))
        assert f"{', '.join(['S(1)', 'S(0)', 'R'][: len(required)])} -> {outputs}" in ways, target
        checked[len(required)] += 1
    assert checked[1] > 80 and checked[2] > 30 and checked[3] >= 3, checked


def _tagged() -> Iterator[Any]:
    # Not dir(aten), which knows the ops that somebody has used before.
    names = {schema.name: None for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")}
    for name in sorted(names):
        packet = getattr(aten, name.removeprefix("aten::"), None)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            target = getattr(packet, overload)
            if pointwise_rule(target) is not None:
                yield target
