"""Layouts of maps: whether a tensor lies channels last, and how it would."""

from __future__ import annotations

from dataclasses import replace

import torch

from commfuse_fx.ir.core.meta import Spec, TensorSpec, contiguous_stride, same_layout


def laid_out(spec: TensorSpec, layout: torch.memory_format) -> TensorSpec:
    if layout is torch.contiguous_format:
        return spec.with_shape(spec.shape)
    rows, channels, height, width = spec.shape
    row, line, column, channel = contiguous_stride((rows, height, width, channels))
    return replace(spec, stride=(row, channel, line, column))


def is_channels_last(spec: Spec) -> bool:
    """Whether it is a tensor of maps with this layout; strides of dimensions of size 1 do not matter."""
    if not isinstance(spec, TensorSpec) or len(spec.shape) != 4:
        return False
    return unless_equal(spec, laid_out(spec, torch.channels_last)) is spec


def unless_equal(before: Spec, after: Spec) -> Spec:
    """`before` wherever it differs from `after` only in strides of dimensions of size 1, which mean nothing."""
    if isinstance(before, tuple) and isinstance(after, tuple):
        return tuple(map(unless_equal, before, after))
    if isinstance(before, TensorSpec) and isinstance(after, TensorSpec):
        return before if same_layout(before.shape, before.stride, after.stride) else after
    return after
