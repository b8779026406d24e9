"""Strides of results that follow from those of what is given, as torch has them."""

from __future__ import annotations

from functools import lru_cache

import torch

from commfuse_fx.ir.core.meta import TensorSpec


@lru_cache(maxsize=1 << 14)
def reshaped(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    """What `aten.reshape` makes of a tensor: a view where its strides allow one, which may have gaps, else a
    contiguous copy."""
    if spec.is_contiguous:
        return spec.with_shape(shape)
    stride = spec.empty("meta").reshape(shape).stride()
    return TensorSpec(shape, spec.dtype, tuple(stride), spec.device)


@lru_cache(maxsize=1 << 14)
def dense_like(spec: TensorSpec) -> TensorSpec:
    """What a copy that preserves strides has: those of a dense tensor, and for another one its order of dimensions
    without gaps."""
    if spec.is_dense:
        return spec
    stride = torch.empty_like(spec.empty("meta")).stride()
    return TensorSpec(spec.shape, spec.dtype, tuple(stride), spec.device)
