"""Softmax and log-softmax, forward and backward.

Along the dimension of the softmax the ranks agree on the maximum and on the sum of the exponentials, two tensors of the
input's size over the length of that dimension; backward needs one such sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from commfuse_fx.ir.core.functions import pure
from commfuse_fx.ir.core.placement import P, Placement, R, S
from commfuse_fx.sharding.rules.writing.call import AllReduce, OpCall, Ref, Result, Step, Strategy
from commfuse_fx.sharding.rules.writing.named import strategy
from commfuse_fx.sharding.rules.writing.rule_registry import rule

aten = torch.ops.aten


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Convert to the precision in which torch's own softmax sums: float32 for narrower types."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def maximum_of_part(x: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
    """Maxima along `dim`, kept as a dimension of size 1."""
    return (x if dtype is None else x.to(dtype)).amax(dim, keepdim=True)


def exp_below_maximum(x: torch.Tensor, maximum: torch.Tensor, dtype: torch.dtype | None, safe: bool) -> torch.Tensor:
    """exp(x - maximum). safe: elements of -inf give zeros, also where the maximum is -inf."""
    given = _wide(x if dtype is None else x.to(dtype))
    shifted = given - _wide(maximum)
    return shifted.masked_fill(given == float("-inf"), float("-inf")).exp() if safe else shifted.exp()


def normalized_by(exponentials: torch.Tensor, total: torch.Tensor, dtype: torch.dtype, safe: bool) -> torch.Tensor:
    """exponentials / total. safe: a total of zero gives zeros."""
    result = exponentials / total
    return (result.masked_fill(total == 0, 0.0) if safe else result).to(dtype)


def sum_of_exp_below_maximum(x: torch.Tensor, maximum: torch.Tensor, dim: int) -> torch.Tensor:
    """sum(exp(x - maximum)) along `dim`."""
    return (_wide(x) - _wide(maximum)).exp().sum(dim, keepdim=True)


def log_normalized_by(x: torch.Tensor, maximum: torch.Tensor, total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x - maximum - log(total)."""
    return (_wide(x) - _wide(maximum) - total.log()).to(dtype)


def sum_of_products(grad: torch.Tensor, output: torch.Tensor, dim: int) -> torch.Tensor:
    return (_wide(grad) * _wide(output)).sum(dim, keepdim=True)


def sum_of_gradients(grad: torch.Tensor, dim: int) -> torch.Tensor:
    return _wide(grad).sum(dim, keepdim=True)


def softmax_gradient(grad: torch.Tensor, output: torch.Tensor, total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """output * (grad - total), where `total` is the sum of grad * output."""
    return (_wide(output) * (_wide(grad) - total)).to(dtype)


def log_softmax_gradient(
    grad: torch.Tensor, output: torch.Tensor, total: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """grad - exp(output) * total, where `total` is the sum of grad."""
    return (_wide(grad) - _wide(output).exp() * total).to(dtype)


_PURE: tuple[Callable[..., Any], ...] = (
    maximum_of_part,
    exp_below_maximum,
    normalized_by,
    sum_of_exp_below_maximum,
    log_normalized_by,
    sum_of_products,
    sum_of_gradients,
    softmax_gradient,
    log_softmax_gradient,
)
for _function in _PURE:
    pure(_function)


def _sum_bytes(dtype: torch.dtype) -> int:
    """Bytes of one element of a sum in the precision of `_wide`."""
    return max(dtype.itemsize, 4)


def _others(call: OpCall, names: Sequence[str], dim: int) -> list[Strategy]:
    """Strategies along all dimensions but that of the softmax."""
    dims = range(len(call.inputs[0].shape))
    return [strategy(call, dict.fromkeys(names, S(d)), (S(d),)) for d in dims if d != dim]


def _dim(call: OpCall) -> int:
    dims = len(call.inputs[0].shape)
    return int(call.bound()["dim"]) % dims if dims else 0


def _rows(call: OpCall, dim: int) -> int:
    """The number of softmaxes in the call, which is that of all elements over the size of `dim`."""
    shape = call.inputs[0].shape
    return call.inputs[0].numel // max(shape[dim], 1) if shape else 1


@rule(aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default)
def softmax(call: OpCall) -> Sequence[Strategy]:
    dim = _dim(call)
    spec, out = call.inputs[0], call.outputs[0]
    assert out is not None
    x = Ref(0)
    safe = call.target is aten._safe_softmax.default
    # The type of the maxima: that of the input, or what _safe_softmax converts it to first.
    dtype = call.bound()["dtype"] if safe else None
    comm = _rows(call, dim) * ((dtype or spec.dtype).itemsize + _sum_bytes(dtype or spec.dtype))
    if call.target is aten._log_softmax.default:
        steps: tuple[Step | AllReduce, ...] = (
            Step(maximum_of_part, (x, dim, None)),
            AllReduce(Result(0), "max"),
            Step(sum_of_exp_below_maximum, (x, Result(1), dim)),
            AllReduce(Result(2)),
            Step(log_normalized_by, (x, Result(1), Result(3), out.dtype)),
        )
    else:
        steps = (
            Step(maximum_of_part, (x, dim, dtype)),
            AllReduce(Result(0), "max"),
            Step(exp_below_maximum, (x, Result(1), dtype, safe)),
            Step(aten.sum.dim_IntList, (Result(2), (dim,), True)),
            AllReduce(Result(3)),
            Step(normalized_by, (Result(2), Result(4), out.dtype, safe)),
        )
    return [*_others(call, ("self",), dim), strategy(call, {"self": S(dim)}, (S(dim),), steps, comm)]


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward(call: OpCall) -> Sequence[Strategy]:
    dim, names = _dim(call), ("grad_output", "output")
    out = call.outputs[0]
    assert out is not None
    grad, output = Ref(0), Ref(1)
    if call.target is aten._softmax_backward_data.default:
        total, result = Step(sum_of_products, (grad, output, dim)), softmax_gradient
    else:
        total, result = Step(sum_of_gradients, (grad, dim)), log_softmax_gradient
    steps = (total, AllReduce(Result(0)), Step(result, (grad, output, Result(1), out.dtype)))
    comm = _rows(call, dim) * _sum_bytes(call.inputs[0].dtype)
    placed = dict.fromkeys(names, S(dim))
    return [*_others(call, names, dim), strategy(call, placed, (S(dim),), steps, comm)]


def _with_rows(call: OpCall, d: int) -> tuple[Placement, ...]:
    """Inputs divided along `d`, those excepted that have one element there: a maximum or sum of every row."""
    size = max(spec.shape[d] for spec in call.inputs)
    return tuple(R if spec.shape[d] != size else S(d) for spec in call.inputs)


@rule(exp_below_maximum, normalized_by, log_normalized_by, softmax_gradient, log_softmax_gradient)
def elementwise_part(call: OpCall) -> Sequence[Strategy]:
    """Strategies to divide the function once more, over another mesh axis: along any dimension."""
    return [Strategy((S(d),), _with_rows(call, d)) for d in range(len(call.inputs[0].shape))]


@rule(maximum_of_part, sum_of_exp_below_maximum, sum_of_products, sum_of_gradients)
def reducing_part(call: OpCall) -> Sequence[Strategy]:
    """Strategies to divide the function once more, over another mesh axis, along any dimension.

    Along the dimension of the softmax a maximum is reduced over that axis, and a sum becomes a partial sum.
    """
    own = call.args[1] if call.target in (maximum_of_part, sum_of_gradients) else call.args[2]
    out = call.outputs[0]
    assert out is not None
    dims = range(len(call.inputs[0].shape))
    found = [Strategy((S(d),), _with_rows(call, d)) for d in dims if d != own]
    if call.target is maximum_of_part:
        steps = (Step(maximum_of_part, call.args), AllReduce(Result(0), "max"))
        return [*found, Strategy((R,), _with_rows(call, own), steps, comm=out.nbytes)]
    return [*found, Strategy((P,), _with_rows(call, own))]
