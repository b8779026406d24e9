"""How PyTorch rounds numbers of half precision, where Inductor does not by itself or rounds otherwise (torch 2.13).

Why: docs/decisions.md, "Half precision is rounded where a jump follows".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from commfuse_fx.ir.core.meta import tensor_spec
from commfuse_fx.kernels.continuous_ops import is_half

aten = torch.ops.aten

_OF_ROUNDED_NUMBERS = (aten.full.default, aten.full_like.default)
_OF_ROUNDED_NUMBERS_ON_CPU = (
    aten.add.Scalar,
    aten.add.Tensor,
    aten.fmod.Scalar,
    aten.remainder.Scalar,
    aten.rsub.Scalar,
    aten.sub.Scalar,
    aten.sub.Tensor,
)
"""Ops that round a number of Python's to half precision before they compute. Products take it as it is."""

_ROUNDED_OTHERWISE = (
    aten._log_softmax.default,
    aten._safe_softmax.default,
    aten._softmax.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.addcdiv.default,
    aten.glu.default,
    aten.huber_loss.default,
    aten.lerp.Scalar,
    aten.lerp.Tensor,
    aten.logit.default,
    aten.smooth_l1_loss.default,
    aten.xlogy.Scalar_Other,
    aten.xlogy.Tensor,
)
"""Ops that PyTorch computes in one, and Inductor in several that each round, or the other way around."""


def rounded_numbers(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's arguments, with numbers of Python's as PyTorch's own kernel sees them."""
    on_cpu = is_half(node) and tensor_spec(node).device == "cpu"
    rounds = node.target in _OF_ROUNDED_NUMBERS or (on_cpu and node.target in _OF_ROUNDED_NUMBERS_ON_CPU)
    if not (rounds and is_half(node)):
        return node.args, node.kwargs
    dtype = tensor_spec(node).dtype

    def rounded(value: Any) -> Any:
        return torch.tensor(value, dtype=dtype).item() if type(value) in (int, float) else value

    return tuple(map(rounded, node.args)), {key: rounded(value) for key, value in node.kwargs.items()}


def is_rounded_otherwise(node: fx.Node) -> bool:
    """Whether Inductor, told to round as PyTorch does, does not: it rounds in the middle of this op, or not there."""
    if not is_half(node):
        return False
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        return bool(node.kwargs.get("alpha", 1) != 1)
    if node.target is aten.pow.Tensor_Scalar:
        return node.args[1] not in (1, 2, 0.5)
    return node.target in _ROUNDED_OTHERWISE
