"""Updates of parameters that are no block of memory of their own: views with gaps, and memory that tensors share.

The fused and list kernels of PyTorch take their operands for blocks of memory in one order. These ops make the same
updates by torch.optim's own code for one parameter after another, which is right for any strides.

Why: docs/decisions.md, "Fused and list ops run on blocks of memory only".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.rmsprop import rmsprop
from torch.optim.sgd import sgd

Tensors = list[torch.Tensor]

_library = torch.library.Library("commfuse", "FRAGMENT")


def _adam(
    self: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    steps: Tensors,
    **settings: Any,
) -> None:
    decoupled = settings.pop("decoupled")
    capturable = any(step.is_cuda for step in steps)
    counts = _counts(steps)
    adam(
        self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, counts,
        foreach=False, fused=False, capturable=capturable, decoupled_weight_decay=decoupled, **settings,
    )  # fmt: skip


def _sgd(
    self: Tensors, grads: Tensors, momentum_buffers: Tensors, *, is_first_step: bool, dampening: float, **settings: Any
) -> None:
    """A new momentum buffer is zero, and takes the whole gradient."""
    buffers: list[torch.Tensor | None] = [*momentum_buffers] if momentum_buffers else [None] * len(self)
    dampening = 0.0 if is_first_step else dampening
    sgd(self, grads, buffers, foreach=False, fused=False, dampening=dampening, **settings)


def _adagrad(self: Tensors, grads: Tensors, sums: Tensors, steps: Tensors, **settings: Any) -> None:
    adagrad(self, grads, sums, _counts(steps), foreach=False, fused=False, **settings)


def _rmsprop(
    self: Tensors,
    grads: Tensors,
    square_avgs: Tensors,
    momentum_buffers: Tensors,
    grad_avgs: Tensors,
    steps: Tensors,
    **settings: Any,
) -> None:
    capturable = any(step.is_cuda for step in steps)
    rmsprop(
        self, grads, square_avgs, grad_avgs, momentum_buffers, _counts(steps),
        foreach=False, capturable=capturable, centered=bool(grad_avgs), **settings,
    )  # fmt: skip


def _counts(steps: Sequence[torch.Tensor]) -> Tensors:
    """The step counts, which torch.optim has without dimensions, and raises by one."""
    return [step.view(()) for step in steps]


_DEFINED: dict[str, tuple[str, Callable[..., None]]] = {
    "adam": (
        "Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] steps, *, "
        "float lr, float beta1, float beta2, float weight_decay, float eps, bool amsgrad, bool maximize, "
        "bool decoupled",
        _adam,
    ),
    "sgd": (
        "Tensor(c!)[] momentum_buffers, *, float lr, float momentum, float dampening, float weight_decay, "
        "bool nesterov, bool maximize, bool is_first_step",
        _sgd,
    ),
    "adagrad": (
        "Tensor(c!)[] sums, Tensor(d!)[] steps, *, float lr, float lr_decay, float weight_decay, float eps, "
        "bool maximize",
        _adagrad,
    ),
    "rmsprop": (
        "Tensor(c!)[] square_avgs, Tensor(d!)[] momentum_buffers, Tensor(e!)[] grad_avgs, Tensor(f!)[] steps, *, "
        "float lr, float alpha, float eps, float momentum, float weight_decay, bool maximize",
        _rmsprop,
    ),
}

for _name, (_arguments, _kernel) in _DEFINED.items():
    _library.define(f"plain_{_name}_(Tensor(a!)[] self, Tensor[] grads, {_arguments}) -> ()")
    torch.library.impl(f"commfuse::plain_{_name}_", "CompositeExplicitAutograd", lib=_library)(_kernel)

plain_adam_ = torch.ops.commfuse.plain_adam_.default
"""Adam and AdamW. `steps`: one count per parameter, of one element, which the op raises by one."""

plain_sgd_ = torch.ops.commfuse.plain_sgd_.default
"""SGD. `momentum_buffers` is empty where there is no momentum."""

plain_adagrad_ = torch.ops.commfuse.plain_adagrad_.default
"""Adagrad."""

plain_rmsprop_ = torch.ops.commfuse.plain_rmsprop_.default
"""RMSprop. `momentum_buffers` and `grad_avgs` are empty where they are not used."""
