"""Pooling, resizing and reflecting: ops that treat every image of every channel alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commfuse_fx.ir.core.placement import S
from commfuse_fx.sharding.rules.writing.call import OpCall, Strategy
from commfuse_fx.sharding.rules.writing.named import changed
from commfuse_fx.sharding.rules.writing.rule_registry import rule

aten = torch.ops.aten

_1D = (
    aten.avg_pool1d.default,
    aten.reflection_pad1d.default,
    aten.reflection_pad1d_backward.default,
    aten.replication_pad1d.default,
    aten.replication_pad1d_backward.default,
    aten.upsample_nearest1d.default,
    aten.upsample_linear1d.default,
    aten._upsample_nearest_exact1d.default,
)
_2D = (
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad2d_backward.default,
    aten.replication_pad2d.default,
    aten.replication_pad2d_backward.default,
    aten.upsample_nearest2d.default,
    aten.upsample_bilinear2d.default,
    aten.upsample_bicubic2d.default,
    aten._upsample_nearest_exact2d.default,
    aten._upsample_bilinear2d_aa.default,
    aten._upsample_bicubic2d_aa.default,
)
_3D = (
    aten.max_pool3d_with_indices.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.avg_pool3d.default,
    aten.avg_pool3d_backward.default,
    aten._adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool3d_backward.default,
    aten.adaptive_max_pool3d.default,
    aten.adaptive_max_pool3d_backward.default,
    aten.reflection_pad3d.default,
    aten.reflection_pad3d_backward.default,
    aten.replication_pad3d.default,
    aten.replication_pad3d_backward.default,
    aten.upsample_nearest3d.default,
    aten.upsample_trilinear3d.default,
    aten._upsample_nearest_exact3d.default,
)
_RESIZED_BACKWARD = (
    aten.upsample_nearest1d_backward.default,
    aten.upsample_linear1d_backward.default,
    aten._upsample_nearest_exact1d_backward.default,
    aten.upsample_nearest2d_backward.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_bicubic2d_backward.default,
    aten._upsample_nearest_exact2d_backward.default,
    aten._upsample_bilinear2d_aa_backward.default,
    aten._upsample_bicubic2d_aa_backward.default,
    aten.upsample_nearest3d_backward.default,
    aten.upsample_trilinear3d_backward.default,
    aten._upsample_nearest_exact3d_backward.default,
)

_SPATIAL: dict[Any, int] = {
    op: dims for dims, ops in ((1, _1D), (2, _2D), (3, _3D)) for op in ops
}  # how many dimensions an image has


@rule(*_1D, *_2D, *_3D)
def per_image(call: OpCall) -> Sequence[Strategy]:
    """All tensors have the batch (if any) and the channels in front."""
    outer = len(call.inputs[0].shape) - _SPATIAL[call.target]
    return [Strategy((S(d),) * len(call.outputs), (S(d),) * len(call.inputs)) for d in range(outer)]


@rule(*_RESIZED_BACKWARD)
def resize_backward(call: OpCall) -> Sequence[Strategy]:
    sizes = call.bound()["input_size"]
    found: list[Strategy] = []
    for d in (0, 1):
        own = tuple(size // call.ways if i == d else size for i, size in enumerate(sizes))
        found.append(Strategy((S(d),), (S(d),), (changed(call, {"input_size": own}),)))
    return found
