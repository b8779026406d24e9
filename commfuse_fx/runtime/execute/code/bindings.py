"""Ops of generated code, called by the functions of `torch` and `torch.Tensor` that lead to them.

An op's own callable (`torch.ops.aten.mm.default`) goes through a stack of boxed values. The functions that PyTorch
generates for Python do without: they take 0.3 to 1 microsecond less per call, as much as some views take. A function is
listed if it runs exactly this overload for all arguments that a graph holds, which a test proves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

BINDINGS: dict[Any, Callable[..., Any]] = {
    # These take the learning rate as a number or as a tensor.
    aten._fused_adagrad_.default: torch._fused_adagrad_,
    aten._fused_adam_.default: torch._fused_adam_,
    aten._fused_adamw_.default: torch._fused_adamw_,
    aten._fused_sgd_.default: torch._fused_sgd_,
    aten.add.Tensor: torch.add,
    aten.add.out: torch.add,
    aten.add_.Tensor: torch.Tensor.add_,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.copy_.default: torch.Tensor.copy_,
    aten.div.Tensor: torch.div,
    aten.exp.default: torch.exp,
    aten.expand.default: torch.Tensor.expand,
    aten.mm.default: torch.mm,
    aten.mm.out: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.mul_.Tensor: torch.Tensor.mul_,
    aten.neg.default: torch.neg,
    aten.permute.default: torch.permute,
    aten.relu.default: torch.relu,
    aten.relu_.default: torch.relu_,
    aten.rsqrt.default: torch.rsqrt,
    aten.select.int: torch.select,
    aten.sigmoid.default: torch.sigmoid,
    aten.sub.Tensor: torch.sub,
    aten.sum.IntList_out: torch.sum,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.tanh.default: torch.tanh,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
}


def bound(function: Any) -> Callable[..., Any]:
    """The callable that takes least time for what a node calls: an op, or a Python function, which stays itself."""
    found: Callable[..., Any] = function
    if isinstance(function, torch._ops.OpOverload):
        found = BINDINGS.get(function) or function._op  # an overload's own callable skips a Python frame per call
    return found
