"""Ops that divide by a count of the whole batch, written as sums and divisions.

A mean over a divided batch is not the mean of the parts' means where ranks count differently (ignored targets), and
the statistics of BatchNorm are those of the whole batch. Written with sums, both come out as on one device: a sum over
a divided dimension is a partial sum, and what follows waits for the total.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from commfuse_fx.ir.core.bound_arguments import bound_arguments

aten = torch.ops.aten

ELEMENTWISE_LOSSES = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
)

ELEMENTWISE_LOSSES_BACKWARD = (
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.soft_margin_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
)

_MEAN, _SUM = 1, 2  # at::Reduction

_TABLE: dict[Any, Callable[..., Any]] = {}


def decompose(target: Any) -> Callable[..., Any] | None:
    """A function with the op's arguments that calls aten ops only and returns the op's results; None if there is none.

    The function returns NotImplemented for calls that need no change (another reduction, evaluation mode), which is
    what torch expects of the functions in a table of decompositions. What it calls may have the same op as target, for
    which it then returns NotImplemented.
    """
    return _TABLE.get(target)


def decomposed() -> list[Any]:
    """All ops with a decomposition, in the order of registration."""
    return list(_TABLE)


def _replaces(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for target in targets:
            _TABLE[target] = function
        return function

    return register


def _nll_forward(op: Any) -> Callable[..., Any]:
    def forward(
        x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
    ) -> Any:
        if reduction != _MEAN:
            return NotImplemented
        loss, total_weight = op(x, target, weight, _SUM, ignore_index)
        return aten.div.Tensor(loss, total_weight), total_weight

    return forward


def _nll_backward(op: Any) -> Callable[..., Any]:
    def backward(
        grad_output: torch.Tensor,
        x: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        reduction: int,
        ignore_index: int,
        total_weight: torch.Tensor,
    ) -> Any:
        if reduction != _MEAN:
            return NotImplemented
        grad = aten.div.Tensor(grad_output, total_weight)
        return op(grad, x, target, weight, _SUM, ignore_index, total_weight)

    return backward


for _forward, _backward in (
    (aten.nll_loss_forward.default, aten.nll_loss_backward.default),
    (aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default),
):
    _replaces(_forward)(_nll_forward(_forward))
    _replaces(_backward)(_nll_backward(_backward))


def _count(arguments: dict[str, Any]) -> int:
    """Number of elements that an elementwise loss compares; its operands broadcast."""
    operands = [v for k, v in arguments.items() if isinstance(v, torch.Tensor) and k != "grad_output"]
    return int(torch.broadcast_shapes(*(operand.shape for operand in operands)).numel())


def _mean_loss(op: Any) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments = bound_arguments(op, args, kwargs)
        if arguments["reduction"] != _MEAN:
            return NotImplemented
        total = op(*{**arguments, "reduction": _SUM}.values())
        return aten.div.Scalar(total, _count(arguments))

    return forward


def _mean_loss_backward(op: Any) -> Callable[..., Any]:
    def backward(*args: Any, **kwargs: Any) -> Any:
        arguments = bound_arguments(op, args, kwargs)
        if arguments["reduction"] != _MEAN:
            return NotImplemented
        grad = aten.div.Scalar(arguments["grad_output"], _count(arguments))
        return op(*{**arguments, "grad_output": grad, "reduction": _SUM}.values())

    return backward


for _op in ELEMENTWISE_LOSSES:
    _replaces(_op)(_mean_loss(_op))

for _op in ELEMENTWISE_LOSSES_BACKWARD:
    _replaces(_op)(_mean_loss_backward(_op))


def _sum_type(x: torch.Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if x.dtype == dtype:
        return x
    converted: torch.Tensor = aten._to_copy.default(x, dtype=dtype)
    return converted


def _per_channel(x: torch.Tensor, dims: int, dtype: torch.dtype) -> torch.Tensor:
    """[C] as [1, C, 1, ...], in the precision of the sums."""
    return _to(aten.view.default(x, [1, x.shape[0], *([1] * (dims - 2))]), dtype)


def _channel_sum(x: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = aten.sum.dim_IntList(x, [d for d in range(x.dim()) if d != 1])
    return total


def _normalize(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Result, mean, 1 / standard deviation, biased variance. Two passes, as one loses digits where |mean| is large."""
    dtype, dims = _sum_type(x), x.dim()
    count = x.numel() // x.shape[1]
    wide = _to(x, dtype)
    mean = aten.div.Scalar(_channel_sum(wide), count)
    centred = aten.sub.Tensor(wide, _per_channel(mean, dims, dtype))
    variance = aten.div.Scalar(_channel_sum(aten.mul.Tensor(centred, centred)), count)
    inverse = aten.rsqrt.default(aten.add.Scalar(variance, eps))
    scale = inverse if weight is None else aten.mul.Tensor(inverse, _to(weight, dtype))
    result = aten.mul.Tensor(centred, _per_channel(scale, dims, dtype))
    if bias is not None:
        result = aten.add.Tensor(result, _per_channel(bias, dims, dtype))
    return _to(result, x.dtype), mean, inverse, variance


def _moved(running: torch.Tensor, value: torch.Tensor, momentum: float) -> torch.Tensor:
    """The running statistic after this step."""
    old = aten.mul.Scalar(running, 1 - momentum)
    moved: torch.Tensor = aten.add.Tensor(old, aten.mul.Scalar(_to(value, running.dtype), momentum))
    return moved


@_replaces(aten._native_batch_norm_legit_functional.default)
def _batch_norm_with_statistics(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not training:
        return NotImplemented
    result, mean, inverse, variance = _normalize(x, weight, bias, eps)
    count = x.numel() // x.shape[1]
    unbiased = aten.mul.Scalar(variance, count / (count - 1))
    new_mean = _moved(running_mean, mean, momentum)
    return result, mean, inverse, new_mean, _moved(running_var, unbiased, momentum)


@_replaces(aten._native_batch_norm_legit.no_stats)
def _batch_norm_without_statistics(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    return _normalize(x, weight, bias, eps)[:3] if training else NotImplemented


@_replaces(aten.native_batch_norm.default)
def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """native_batch_norm without running statistics, which it would write in place."""
    if not training or running_mean is not None or running_var is not None:
        return NotImplemented
    return _normalize(x, weight, bias, eps)[:3]


@_replaces(aten.cudnn_batch_norm.default)
def _cudnn_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """The fourth result is cuDNN's scratch memory for its own backward op."""
    found = _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)
    if found is NotImplemented:
        return NotImplemented
    return *found, aten.new_empty.default(x, [0], dtype=torch.uint8)


@_replaces(aten.native_batch_norm_backward.default)
def _batch_norm_backward(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    save_mean: torch.Tensor | None,
    save_invstd: torch.Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Any:
    """The gradient of batch norm, from Ioffe and Szegedy 2015 (arXiv:1502.03167), section 3.

    With x' the normalised input and n elements per channel it is
    weight / deviation * (grad - (sum(grad) + x' * sum(grad * x')) / n).
    """
    if not train or save_mean is None or save_invstd is None:
        return NotImplemented
    dtype, dims = _sum_type(x), x.dim()
    count = x.numel() // x.shape[1]
    grad = _to(grad_out, dtype)
    inverse = _to(save_invstd, dtype)
    normal = aten.mul.Tensor(
        aten.sub.Tensor(_to(x, dtype), _per_channel(save_mean, dims, dtype)), _per_channel(inverse, dims, dtype)
    )
    total = _channel_sum(grad)
    total_normal = _channel_sum(aten.mul.Tensor(grad, normal))
    grad_input = None
    if output_mask[0]:
        scale = inverse if weight is None else aten.mul.Tensor(inverse, _to(weight, dtype))
        mean = _per_channel(aten.div.Scalar(total, count), dims, dtype)
        slope = aten.mul.Tensor(normal, _per_channel(aten.div.Scalar(total_normal, count), dims, dtype))
        rest = aten.sub.Tensor(aten.sub.Tensor(grad, mean), slope)
        grad_input = _to(aten.mul.Tensor(rest, _per_channel(scale, dims, dtype)), x.dtype)
    of_weight = dtype if weight is None else weight.dtype
    grad_weight = _to(total_normal, of_weight) if output_mask[1] else None
    return grad_input, grad_weight, _to(total, of_weight) if output_mask[2] else None
