"""The gradient of a convolution's weight on CPUs: an op of its own, which takes the way that is fastest there.

Without AVX-512, oneDNN's own kernel needs more of the caches than matrix products do: beside others who use them it
takes up to twice as long. So there the op takes one product for each pixel of the kernel or, where channels are many
enough to pay for the transforms, Winograd's tiles.

Why: docs/decisions.md, "Kernels are chosen on the rank, not in the graph".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commfuse_fx.kernels.winograd import tiles_pay, weight_gradient_by_tiles

aten = torch.ops.aten

_library = torch.library.Library("commfuse", "FRAGMENT")
_library.define(
    "convolution_weight_gradient(Tensor grad, Tensor input, Tensor weight, int[] padding, int[] layout) -> Tensor"
)

_CHUNK_BYTES = 5 << 19  # of what is multiplied at once, padded maps or tiles: 2.5 MiB, which stay in the caches


def _weight_gradient(
    grad: torch.Tensor, given: torch.Tensor, weight: torch.Tensor, padding: Sequence[int], layout: Sequence[int]
) -> torch.Tensor:
    found = _fastest(grad, given, weight, padding)
    if found.stride() == tuple(layout):
        return found
    return _like(grad, given, weight, padding, layout).copy_(found)


def _fastest(grad: torch.Tensor, given: torch.Tensor, weight: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    """Laid out in any way."""
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return _by_onednn(grad, given, weight, padding)
    if tiles_pay(grad.shape, weight.shape):
        return _by_tiles(grad, given, weight, padding)
    return _by_products(grad, given, weight, padding)


def _by_onednn(grad: torch.Tensor, given: torch.Tensor, weight: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    one, mask = [1, 1], [False, True, False]
    found: torch.Tensor = aten.convolution_backward.default(
        grad, given, weight, None, one, padding, one, False, [0, 0], 1, mask
    )[1]
    return found


def _by_tiles(grad: torch.Tensor, given: torch.Tensor, weight: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    return weight_gradient_by_tiles(grad, given, padding, _CHUNK_BYTES)


def _by_products(grad: torch.Tensor, given: torch.Tensor, weight: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    """Padded maps with their channels last are one row of channels per pixel.

    To move the kernel by a pixel is to begin some rows later: dL/dW[:, :, i, j] is the product of the rows of dL/dy
    with the rows of x from i * width + j on.
    """
    outs, ins, rows, columns = weight.shape
    count, _, *size = given.shape
    # The padding behind a row is also that before the next one; so are the rows between two images.
    height, width = (max(own + by, got) for own, by, got in zip(size, padding, grad.shape[2:], strict=True))
    pixels = height * width
    lead = padding[0] * width + padding[1]
    at_once = max(1, min(count, _CHUNK_BYTES // (pixels * (ins + outs) * grad.itemsize)))
    # Rows beyond the end meet gradients that are 0, but must be numbers.
    behind = max(lead, (rows - 1) * width + columns - 1)
    padded = grad.new_zeros(at_once * pixels + behind, ins)
    gradient = grad.new_zeros(at_once * pixels, outs)
    inner = padded[lead : lead + at_once * pixels].view(at_once, height, width, ins)[:, : size[0], : size[1]]
    corner = gradient.view(at_once, height, width, outs)[:, : grad.shape[2], : grad.shape[3]]
    found = grad.new_zeros(outs, rows, columns, ins)
    for first in range(0, count, at_once):
        images = min(at_once, count - first)
        inner[:images] = given[first : first + images].permute(0, 2, 3, 1)
        corner[:images] = grad[first : first + images].permute(0, 2, 3, 1)
        left = gradient[: images * pixels].t()
        for i in range(rows):
            for j in range(columns):
                begin = i * width + j
                found[:, i, j].addmm_(left, padded[begin : begin + images * pixels])
    return found.permute(0, 3, 1, 2)


def _like(
    grad: torch.Tensor, given: torch.Tensor, weight: torch.Tensor, padding: Sequence[int], layout: Sequence[int]
) -> torch.Tensor:
    return grad.new_empty_strided(weight.shape, layout)


torch.library.impl("commfuse::convolution_weight_gradient", "CPU", lib=_library)(_weight_gradient)
torch.library.register_fake("commfuse::convolution_weight_gradient", _like, lib=_library)

convolution_weight_gradient = torch.ops.commfuse.convolution_weight_gradient.default
"""(grad (N, C_out, H', W'), input (N, C_in, H, W), weight (C_out, C_in, K_h, K_w), padding of two numbers, layout) ->
dL/dW, whose strides are `layout`, of a convolution whose stride, dilation and groups are 1. `grad` and `input` lie
channels last; of `weight` only the shape is read."""
