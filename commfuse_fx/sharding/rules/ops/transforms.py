"""Fourier transforms and tables of distances, which are divided along the dimensions that they leave apart."""

from __future__ import annotations

from collections.abc import Sequence

from commfuse_fx.ir.core.placement import R, S
from commfuse_fx.sharding.rules.writing.call import OpCall, Strategy
from commfuse_fx.sharding.rules.writing.common import all_summed, along, aten, own_dim, shape_of, wrap_all
from commfuse_fx.sharding.rules.writing.rule_registry import rule


@rule(aten._fft_r2c.default, aten._fft_c2c.default, aten._fft_c2r.default)
def _fourier(call: OpCall) -> Sequence[Strategy]:
    """Linear, and every transform by itself."""
    rank = len(shape_of(call))
    transformed = wrap_all(call.args[1], rank)
    apart = [each for dim in range(rank) if dim not in transformed for each in along(call, (dim,), (dim,))]
    return [all_summed(call), *apart]


@rule(aten._cdist_forward.default)
def _distances(call: OpCall) -> Sequence[Strategy]:
    """[..., rows, features] and [..., others, features] -> [..., rows, others]."""
    whole, (first, second) = shape_of(call), call.inputs
    last = len(whole) - 1
    found = [
        each
        for dim in range(last - 1)
        for each in along(call, (own_dim(first.shape, dim, whole), own_dim(second.shape, dim, whole)), (dim,))
    ]
    rows, others = len(first.shape) - 2, len(second.shape) - 2
    return [*found, Strategy((S(last - 1),), (S(rows), R)), Strategy((S(last),), (R, S(others)))]


@rule(aten._cdist_backward.default)
def _distances_backward(call: OpCall) -> Sequence[Strategy]:
    """Gradient of the first operand, in which a sum runs over the rows of the second."""
    last = len(call.inputs[0].shape) - 1
    batches = [each for dim in range(last - 1) for each in along(call, (dim,) * 4, (dim,))]
    by_row = Strategy((S(last - 1),), (S(last - 1), S(last - 1), R, S(last - 1)))
    return [*batches, by_row]
