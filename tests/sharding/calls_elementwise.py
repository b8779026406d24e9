"""Calls of ops that work on each element for itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.sharding.calls import Case, aten, case, ints, mask, positive, x, z


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
    for op in (aten.real, aten.imag, aten._conj, aten._conj_physical, aten.view_as_real):
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
