"""Ops that combine the elements along dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commfuse_fx.ir.core.placement import R, S
from commfuse_fx.sharding.rules.writing.call import AllReduce, OpCall, Result, Step, Strategy
from commfuse_fx.sharding.rules.writing.common import (
    Steps,
    all_summed,
    along,
    aten,
    keeps_sums,
    shape_of,
    summed,
    tensor_of,
    wrap,
    wrap_all,
)
from commfuse_fx.sharding.rules.writing.rule_registry import rule


def kept_dims(call: OpCall) -> tuple[tuple[int, ...], list[tuple[int, int]]] | None:
    """The dimensions that the call reduces, and for each other one its position before and after.

    None if the shape of the result does not fit the arguments.
    """
    shape = call.inputs[0].shape
    given = call.bound()
    gone = wrap_all(given.get("dim"), len(shape)) if shape else ()
    keepdim = bool(given.get("keepdim", False))
    kept = [dim for dim in range(len(shape)) if dim not in gone]
    pairs = [(dim, dim if keepdim else i) for i, dim in enumerate(kept)]
    expected = [shape[dim] for dim in kept]
    if keepdim:
        expected = [1 if dim in gone else size for dim, size in enumerate(shape)]
    return (gone, pairs) if list(shape_of(call)) == expected else None


def _beside(call: OpCall) -> list[Strategy]:
    """Dimensions that are not reduced."""
    found = kept_dims(call)
    if found is None:
        return []
    return [each for dim, after in found[1] for each in along(call, (dim,), (after,) * len(call.outputs))]


def _over(call: OpCall, steps: Steps) -> list[Strategy]:
    """Reduced dimensions, with steps that leave the whole result on every rank."""
    found = kept_dims(call)
    reduced = sum(isinstance(step, AllReduce) for step in steps) * tensor_of(call).nbytes
    return [
        Strategy((R,), (S(dim, n),), steps, comm=reduced) for dim in (found[0] if found else ()) for n in call.blocks
    ]


def _summed_over(call: OpCall, steps: Steps = ()) -> list[Strategy]:
    """Reduced dimensions, where every rank has a summand of the result."""
    found = kept_dims(call)
    return [summed(call, (S(dim, n),), steps) for dim in (found[0] if found else ()) for n in call.blocks]


def _itself(call: OpCall) -> Step:
    return Step(call.target, call.args, call.kwargs)


def _floating(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


@rule(aten.sum.default, aten.sum.dim_IntList)
def _sum(call: OpCall) -> Sequence[Strategy]:
    before, after = call.inputs[0].dtype, tensor_of(call).dtype
    found = _beside(call)
    if not _floating(after):
        return found + _over(call, (_itself(call), AllReduce(Result(0))))
    return found + _summed_over(call) + ([all_summed(call)] if keeps_sums(before, after) else [])


@rule(aten.mean.default, aten.mean.dim)
def _mean(call: OpCall) -> Sequence[Strategy]:
    found = _beside(call)
    # Parts are equal: the mean is the mean of their means.
    found += _summed_over(call, (_itself(call), Step(aten.div.Tensor, (Result(0), call.ways))))
    return found + ([all_summed(call)] if keeps_sums(call.inputs[0].dtype, tensor_of(call).dtype) else [])


@rule(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def _count(call: OpCall) -> Sequence[Strategy]:
    return _beside(call) + _over(call, (_itself(call), AllReduce(Result(0))))


@rule(aten.histc.default)
def _histogram(call: OpCall) -> Sequence[Strategy]:
    """Between given bounds: without them (both 0) these are the extremes of all elements."""
    given = call.bound()
    return (
        []
        if given["min"] == given["max"]
        else [summed(call, (S(dim, n),)) for dim in range(len(call.inputs[0].shape)) for n in call.blocks]
    )


@rule(aten.amax.default, aten.max.default)
def _largest(call: OpCall) -> Sequence[Strategy]:
    if tensor_of(call).dtype == torch.bool:
        return _beside(call)
    return _beside(call) + _over(call, _maximum_of_ranks(call, (_itself(call),)))


def _maximum_of_ranks(call: OpCall, steps: Steps) -> Steps:
    """These steps, and further ones that reduce the result of the last one to the maximum over the ranks.

    A NaN on any rank gives NaN, as on one device. Gloo and NCCL drop it, so the ranks also reduce where NaNs are.
    """
    end = len(steps)
    value = Result(end - 1)
    if not tensor_of(call).dtype.is_floating_point:
        return (*steps, AllReduce(value, "max"))
    return (
        *steps,
        Step(aten.isnan.default, (value,)),
        Step(aten._to_copy.default, (Result(end),), (("dtype", torch.int32),)),
        AllReduce(Result(end + 1), "max"),
        Step(aten.ne.Scalar, (Result(end + 2), 0)),
        AllReduce(value, "max"),
        Step(aten.masked_fill.Scalar, (Result(end + 4), Result(end + 3), float("nan"))),
    )


@rule(aten.amin.default, aten.min.default)
def _smallest(call: OpCall) -> Sequence[Strategy]:
    if not tensor_of(call).dtype.is_floating_point:  # the smallest integer has no negative
        return _beside(call)
    steps = _maximum_of_ranks(call, (_itself(call), Step(aten.neg.default, (Result(0),))))
    return _beside(call) + _over(call, (*steps, Step(aten.neg.default, (Result(len(steps) - 1),))))


@rule(aten.any.default, aten.any.dim, aten.any.dims)
def _any(call: OpCall) -> Sequence[Strategy]:
    if tensor_of(call).dtype != torch.bool:
        return _beside(call)
    number = Step(aten._to_copy.default, (Result(0),), (("dtype", torch.int32),))
    truth = Step(aten.ne.Scalar, (Result(2), 0))
    return _beside(call) + _over(call, (_itself(call), number, AllReduce(Result(1), "max"), truth))


@rule(aten.all.default, aten.all.dim, aten.all.dims)
def _all(call: OpCall) -> Sequence[Strategy]:
    if tensor_of(call).dtype != torch.bool:
        return _beside(call)
    failed = Step(aten.logical_not.default, (Result(0),))
    number = Step(aten._to_copy.default, (Result(1),), (("dtype", torch.int32),))
    truth = Step(aten.eq.Scalar, (Result(3), 0))
    return _beside(call) + _over(call, (_itself(call), failed, number, AllReduce(Result(2), "max"), truth))


@rule(
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.median.dim,
    aten.kthvalue.default,
    aten.mode.default,
    aten.prod.default,
    aten.prod.dim_int,
    aten.logsumexp.default,
    aten.var.default,
    aten.var.dim,
    aten.var.correction,
    aten.std.default,
    aten.std.dim,
    aten.std.correction,
    aten.var_mean.default,
    aten.var_mean.dim,
    aten.var_mean.correction,
    aten.std_mean.default,
    aten.std_mean.dim,
    aten.std_mean.correction,
)
def _only_beside(call: OpCall) -> Sequence[Strategy]:
    return _beside(call)


@rule(aten.linalg_vector_norm.default)
def _vector_norm(call: OpCall) -> Sequence[Strategy]:
    return _beside(call) + _norm_over(call, call.bound()["ord"])


@rule(aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype, aten.norm.ScalarOpt_dtype)
def _norm(call: OpCall) -> Sequence[Strategy]:
    order = call.bound()["p"]
    return _beside(call) + _norm_over(call, 2 if order is None else order)


def _norm_over(call: OpCall, order: Any) -> list[Strategy]:
    if order == 1:
        return _summed_over(call)
    if order == 2 and tensor_of(call).dtype != torch.float16:  # whose squares soon overflow
        square = Step(aten.mul.Tensor, (Result(0), Result(0)))
        return _over(call, (_itself(call), square, AllReduce(Result(1)), Step(aten.sqrt.default, (Result(2),))))
    if order == float("inf"):
        return _over(call, _maximum_of_ranks(call, (_itself(call),)))
    return []


@rule(aten.cumsum.default)
def _cumsum(call: OpCall) -> Sequence[Strategy]:
    found = list(_scan(call))
    return found + ([all_summed(call)] if keeps_sums(call.inputs[0].dtype, tensor_of(call).dtype) else [])


@rule(
    aten.cumprod.default,
    aten.logcumsumexp.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.sort.default,
    aten.sort.stable,
    aten.argsort.default,
    aten.argsort.stable,
    aten.topk.default,
)
def _scan(call: OpCall) -> Sequence[Strategy]:
    """One dimension is worked on as a whole."""
    rank = len(call.inputs[0].shape)
    taken = wrap(call.bound()["dim"], rank)
    return [
        each
        for dim in range(rank)
        if dim != taken
        for each in along(call, (dim,), (dim,) * len(call.outputs), (_itself(call),))
    ]
