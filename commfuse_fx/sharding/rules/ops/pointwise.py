"""Ops that treat every element by itself; inputs may be broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from commfuse_fx.ir.core.placement import P, Placement, R
from commfuse_fx.sharding.rules.writing.call import OpCall, Ref, Rule, Strategy
from commfuse_fx.sharding.rules.writing.common import (
    all_summed,
    along,
    aten,
    keeps_sums,
    on_first,
    own_dim,
    place,
    scales,
    shape_of,
    summed,
    tensor_of,
    wrap,
)
from commfuse_fx.sharding.rules.writing.rule_registry import generic, rule

_LINEAR = (
    aten.neg.default,
    aten.positive.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
    aten.deg2rad.default,
    aten.rad2deg.default,
    aten.real.default,
    aten.imag.default,
    aten.conj_physical.default,
    aten._conj_physical.default,
    aten._conj.default,
    aten._neg_view.default,
)

# By op: the placements of its tensors (its scalars aside) under which it gives summands of its result. Backwards of
# nonlinear functions are linear in the gradient too, but only those that do no more than mask it are worth delaying
# a reduction for.
_SUMS: dict[Any, tuple[tuple[Placement, ...], ...]] = {
    aten.add.Tensor: ((P, P),),
    aten.sub.Tensor: ((P, P),),
    aten.rsub.Tensor: ((P, P),),
    aten.mul.Tensor: ((P, R), (R, P), (P,)),
    aten.mul.Scalar: ((P,),),
    aten.div.Tensor: ((P, R), (P,)),
    aten.div.Scalar: ((P,),),
    aten.true_divide.Tensor: ((P, R), (P,)),
    aten.where.self: ((R, P, P),),
    aten.native_dropout_backward.default: ((P, R),),
    aten.threshold_backward.default: ((P, R),),
    aten.leaky_relu_backward.default: ((P, R),),
    aten.hardtanh_backward.default: ((P, R),),
    aten.lerp.Scalar: ((P, P),),
    aten.lerp.Tensor: ((P, P, R),),
    aten.addcmul.default: ((P, P, R), (P, R, P)),
    aten.addcdiv.default: ((P, P, R),),
    aten.complex.default: ((P, P),),
} | dict.fromkeys(_LINEAR, ((P,),))

# Pointwise ops without the tag.
_UNTAGGED = (
    aten.contiguous.default,
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
    aten._conj.default,
    aten._neg_view.default,
    aten.real.default,
    aten.imag.default,
    aten.complex.default,
    aten.polar.default,
    aten.rsub.Tensor,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.masked_fill.Tensor,
    aten.where.Scalar,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.elu_backward.default,
    aten.hardswish.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardtanh_backward.default,
    aten.hardshrink_backward.default,
    aten.softshrink_backward.default,
    aten.leaky_relu_backward.default,
    aten.softplus_backward.default,
    aten.mish_backward.default,
    aten.log_sigmoid_forward.default,
    aten.log_sigmoid_backward.default,
    aten._prelu_kernel.default,
    aten._prelu_kernel_backward.default,
)


@generic
def pointwise_rule(target: Any) -> Rule | None:
    """The rule of all functional ops that PyTorch tags as pointwise."""
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return None
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    if any(str(result.type) != "Tensor" for result in target._schema.returns):
        return None  # such as aten.equal
    return pointwise


@rule(*_UNTAGGED)
def pointwise(call: OpCall) -> Sequence[Strategy]:
    """Any dimension of the result, with whatever inputs are not broadcast along it; sums where the op is linear."""
    return [*pointwise_shards(call), *_sums(call)]


def pointwise_shards(call: OpCall) -> list[Strategy]:
    """Each dimension of the result divided."""
    whole = shape_of(call)
    if any(spec is None or spec.shape != whole for spec in call.outputs):
        return []  # such as the empty buffer that log_sigmoid_forward has on CUDA
    found: list[Strategy] = []
    for dim in range(len(whole)):
        own = [own_dim(spec.shape, dim, whole) for spec in call.inputs]
        if any(at is not None for at in own):
            found += along(call, own, (dim,) * len(call.outputs))
    return found


def _sums(call: OpCall) -> list[Strategy]:
    fitting = [inputs for inputs in _SUMS.get(call.target, ()) if len(inputs) == len(call.inputs)]
    # With one tensor only, that has to be the one in which the op is linear: 2 / x has one, too.
    if len(call.inputs) == 1 and not isinstance(call.args[0], Ref):
        return []
    return [summed(call, inputs) for inputs in fitting]


@rule(aten._to_copy.default)
def _to_copy(call: OpCall) -> Sequence[Strategy]:
    lossless = keeps_sums(call.inputs[0].dtype, tensor_of(call).dtype)
    return [*pointwise_shards(call), *([all_summed(call)] if lossless else [])]


@rule(aten.copy.default)
def _copy(call: OpCall) -> Sequence[Strategy]:
    found = pointwise_shards(call)
    if keeps_sums(call.inputs[1].dtype, call.inputs[0].dtype):
        found += [summed(call, (R, P)), summed(call, (P, P))]
    return found


@rule(aten.masked_fill.Scalar)
def _masked_fill(call: OpCall) -> Sequence[Strategy]:
    return [*pointwise_shards(call), *([summed(call, (P, R))] if call.args[2] == 0 else [])]


@rule(aten.where.ScalarOther)
def _where_scalar_other(call: OpCall) -> Sequence[Strategy]:
    return _where_scalar(call, call.args[2])


@rule(aten.where.ScalarSelf)
def _where_scalar_self(call: OpCall) -> Sequence[Strategy]:
    return _where_scalar(call, call.args[1])


def _where_scalar(call: OpCall, scalar: Any) -> Sequence[Strategy]:
    return [*pointwise_shards(call), *([summed(call, (R, P))] if scalar == 0 else [])]


@rule(on_first)
def _on_first(call: OpCall) -> Sequence[Strategy]:
    return [*pointwise_shards(call), all_summed(call)]


@rule(aten.bucketize.Tensor, aten.isin.Tensor_Tensor)
def _looked_up(call: OpCall) -> Sequence[Strategy]:
    """Every element by itself, with all of a second tensor."""
    return [each for dim in range(len(shape_of(call))) for each in along(call, (dim, None), (dim,))]


@rule(aten.bucketize.Scalar, aten.isin.Scalar_Tensor)
def _no_elements(call: OpCall) -> Sequence[Strategy]:
    return []


@rule(aten.isin.Tensor_Scalar)
def _looked_up_scalar(call: OpCall) -> Sequence[Strategy]:
    return pointwise_shards(call)


@rule(aten.glu.default, aten.glu_backward.default)
def _glu(call: OpCall) -> Sequence[Strategy]:
    """Gated: the first half of a dimension with the second half, so both halves are divided alike."""
    rank = len(shape_of(call))
    gated = wrap(call.bound()["dim"], rank)
    found: list[Strategy] = []
    for dim in range(rank):
        if dim != gated:
            found += along(call, (dim,) * len(call.inputs), (dim,))
            continue
        for blocks in scales(call, 2):
            half, both = place(dim, blocks), place(dim, 2 * blocks)
            forward = call.target is aten.glu.default
            found.append(Strategy((half,), (both,)) if forward else Strategy((both,), (half, both)))
    return found
