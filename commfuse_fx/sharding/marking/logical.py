"""Logical dimensions: find the dimensions of one call's tensors that are the same dimension of the computation.

The contracted dimension of a matmul is in both operands. Tensors that broadcast have their dimensions aligned from the
right. Equal logical dimensions get equal counts of slices, so that the tensors of one call fit together.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_MATMUL: tuple[Callable[..., Any], ...] = (torch.matmul, torch.mm, torch.bmm, torch.mv, operator.matmul)
_MATMUL_METHODS = (torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.bmm, torch.Tensor.mv, torch.Tensor.__matmul__)
_ADDMM: tuple[Callable[..., Any], ...] = (torch.addmm, torch.baddbmm)


def kind_of_function(function: Callable[..., Any], ndims: tuple[int, ...]) -> str:
    """The kind of a call of `function`. ndims: the number of dimensions of each tensor argument."""
    if function in _MATMUL or function in _MATMUL_METHODS:
        if len(ndims) == 2 and 1 in ndims:
            return {(1, 1): "dot"}.get(ndims, "vecmat" if ndims[0] == 1 else "matvec")
        return "matmul"
    if function in _ADDMM:
        return "addmm"
    if function is F.linear:
        return "linear"
    return "embedding" if function is F.embedding else "broadcast"


def kind_of_module(module: nn.Module) -> str:
    """The kind of a call of `module`."""
    name = type(module).__name__
    if isinstance(module, nn.Linear):
        return "linear"
    if name == "Conv1D" and getattr(getattr(module, "weight", None), "ndim", 0) == 2:
        return "conv1d"  # as in GPT-2: a linear layer whose weight is [in, out]
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.LayerNorm) or name.endswith("RMSNorm"):
        return "broadcast"
    return "module"


def logical_dims(kind: str, position: str, ndim: int) -> tuple[str, ...]:
    """A label for each dimension of one tensor of a call; equal labels are the same dimension.

    position: "in0", "in1", ... ("in:name" for a tensor given by keyword), "out0", ..., or the name of a parameter.
    """
    found = _contraction(kind, position, ndim)
    if found is not None and len(found) == ndim:
        return found
    if kind == "module" and not position.startswith(("in", "out")):
        return tuple(f"{position} {dim}" for dim in range(ndim))
    return _aligned(ndim)


def _aligned(ndim: int) -> tuple[str, ...]:
    return tuple(f"{dim - ndim}" for dim in range(ndim))


def _contraction(kind: str, position: str, ndim: int) -> tuple[str, ...] | None:
    """Batch dimensions are aligned from the right; m, n and k as in [m, k] @ [k, n]."""
    own = _OWN.get(kind, {}).get(position)
    if own is None:
        return None
    batched = position == "out0" or kind in _BATCHED or (position == "in0" and kind != "addmm")
    if not batched:
        return own[-ndim:] if ndim else ()
    batch = ndim - len(own)
    if batch < 0:
        return own[-ndim:] if kind == "addmm" and ndim else None
    return (*(f"batch {dim - batch}" for dim in range(batch)), *own)


_BATCHED = ("matmul", "matvec", "vecmat", "addmm")

_OWN: dict[str, dict[str, tuple[str, ...]]] = {
    "matmul": {"in0": ("m", "k"), "in1": ("k", "n"), "out0": ("m", "n")},
    "matvec": {"in0": ("m", "k"), "in1": ("k",), "out0": ("m",)},
    "vecmat": {"in0": ("k",), "in1": ("k", "n"), "out0": ("n",)},
    "dot": {"in0": ("k",), "in1": ("k",)},
    "addmm": {"in0": ("m", "n"), "in1": ("m", "k"), "in2": ("k", "n"), "out0": ("m", "n")},
    "linear": {"in0": ("k",), "in1": ("n", "k"), "in2": ("n",), "weight": ("n", "k"), "bias": ("n",), "out0": ("n",)},
    "conv1d": {"in0": ("k",), "weight": ("k", "n"), "bias": ("n",), "out0": ("n",)},
    "embedding": {"in0": (), "in1": ("v", "h"), "weight": ("v", "h"), "out0": ("h",)},
}
