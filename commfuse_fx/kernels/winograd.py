"""The gradient of a 3x3 convolution's weight from tiles, with 16 multiplications where the definition takes 36.

Winograd's algorithm F(3x3, 2x2) (Lavin and Gray, "Fast algorithms for convolutional neural networks",
arXiv:1509.09308): tiles of 4x4 pixels of the input and of 2x2 of the gradient are transformed by sums alone, multiplied
place by place, which is one matrix product for each of 16 places, and the 16 results are combined once, at the end.
In one dimension, for inputs d and gradients y:

    v = d0 - d2, d1 + d2, d2 - d1, d3 - d1      z = y0, y0 + y1, y0 - y1, y1      m = v * z
    dL/dw = m0 + (m1 + m2) / 2, (m1 - m2) / 2, (m1 + m2) / 2 + m3

Errors are small relative to the largest element of a gradient, not to each: what a pixel of the kernel does not meet
enters its sums as well, and cancels only up to rounding. For the same reason an overflow or an infinity in a tile makes
all 9 pixels of a kernel non-finite.

Why: docs/decisions.md, "Gradients of 3x3 weights come from Winograd's tiles where that pays".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_TILE = 4  # pixels of input in each dimension, which step by _STEP
_STEP = 2  # pixels of gradient
_PLACES = _TILE * _TILE
_COMBINE = ((1.0, 0.0, 0.0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0.0, 0.0, 1.0))  # places -> pixels of the kernel

# Tiles beat one product per pixel of the kernel, and oneDNN, from these on. Fewer multiplications for each number that
# is transformed, or written as a result, do not pay for it; fewer in all not for the calls.
_INTENSITY = 20
_MULTIPLICATIONS = 1 << 19


def tiles_pay(grad: Sequence[int], weight: Sequence[int]) -> bool:
    """Of a gradient (N, C_out, H', W') and a weight (C_out, C_in, K_h, K_w), where stride and dilation are 1."""
    outs, ins, *kernel = weight
    if kernel != [3, 3]:
        return False
    count, _, height, width = grad
    if (height == 1) != (width == 1):
        # Half of each tile lies beside the line: nothing is gained. And pixels of the kernel that meet nothing but
        # padding would get rounding errors for zeros, which Adam turns into whole steps. On single pixels, sums of
        # the places cancel exactly.
        return False
    tiles = count * -(-height // _STEP) * -(-width // _STEP)
    work = outs * ins * tiles  # multiplications for each of the places
    return work >= max(_MULTIPLICATIONS, _INTENSITY * (outs * ins + (outs + ins) * tiles))


def weight_gradient_by_tiles(
    grad: torch.Tensor, given: torch.Tensor, padding: Sequence[int], chunk_bytes: int
) -> torch.Tensor:
    """dL/dW (C_out, C_in, 3, 3), in strides of its own, from `grad` (N, C_out, H', W') and the input (N, C_in, H, W).

    Stride and dilation are 1. `chunk_bytes`: of transformed tiles that are worked on at once; one row of them at least.
    """
    gradient, maps = grad.permute(0, 2, 3, 1), given.permute(0, 2, 3, 1)
    count, height, width, outs = gradient.shape
    ins = maps.shape[-1]
    down, across = -(-height // _STEP), -(-width // _STEP)
    tiles = chunk_bytes // (_PLACES * (ins + outs) * grad.itemsize)
    rows = _share(down, tiles // across)
    images = _share(count, tiles // (rows * across)) if rows == down else 1

    tall, wide = _STEP * rows, _STEP * across
    overlap = _TILE - _STEP
    padded = grad.new_empty(images, tall + overlap, wide + overlap, ins)
    padded_gradient = grad.new_empty(images, tall, wide, outs)
    # Transformed by rows, and then by columns as well. Written in place: fresh memory would cost as much as the sums.
    half = grad.new_empty(_TILE, images, rows, wide + overlap, ins)
    full = grad.new_empty(_TILE, _TILE, images, rows, across, ins)
    half_gradient = grad.new_empty(_TILE, images, rows, wide, outs)
    full_gradient = grad.new_empty(_TILE, _TILE, images, rows, across, outs)
    products = grad.new_zeros(_PLACES, outs, ins)
    for first in range(0, count, images):
        for top in range(0, height, tall):
            x = _window(maps, first, top, padded, padding)
            y = _window(gradient, first, top, padded_gradient, (0, 0))
            _input_tiles([x[:, k : k + tall : _STEP] for k in range(_TILE)], half)
            _input_tiles([half[:, :, :, k : k + wide : _STEP] for k in range(_TILE)], full)
            _gradient_tiles([y[:, k::_STEP] for k in range(_STEP)], half_gradient)
            _gradient_tiles([half_gradient[:, :, :, k::_STEP] for k in range(_STEP)], full_gradient)
            left = full_gradient.view(_PLACES, -1, outs).transpose(1, 2)
            products.baddbmm_(left, full.view(_PLACES, -1, ins))
    combine = grad.new_tensor(_COMBINE)
    # The first transform, by rows, counts last in the places: they are (column, row), and so are the kernel's pixels.
    kernel = (torch.kron(combine, combine).t() @ products.view(_PLACES, -1)).view(3, 3, outs, ins)
    return kernel.permute(2, 3, 1, 0)


def _share(count: int, most: int) -> int:
    """How many of `count` to take at once so that the turns are as few as with `most`, and all alike."""
    turns = -(-count // max(1, min(count, most)))
    return -(-count // turns)


def _window(maps: torch.Tensor, image: int, top: int, buffer: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    """Rows from `top` on of the padded maps (N, H, W, C), for as many images as `buffer` has, and as large as it is.

    A view where the maps reach that far; else `buffer`, with zeros in padding and in what lies beyond the maps.
    """
    images, rows = buffer.shape[:2]
    begin = top - padding[0]
    part = maps[image : image + images, max(begin, 0) : max(begin + rows, 0)]
    if part.shape == buffer.shape and begin >= 0 and padding[1] == 0:
        return part
    buffer.zero_()
    above = max(-begin, 0)
    buffer[: part.shape[0], above : above + part.shape[1], padding[1] : padding[1] + part.shape[2]] = part
    return buffer


def _input_tiles(d: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    torch.sub(d[0], d[2], out=out[0])
    torch.add(d[1], d[2], out=out[1])
    torch.sub(d[2], d[1], out=out[2])
    torch.sub(d[3], d[1], out=out[3])


def _gradient_tiles(y: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    out[0] = y[0]
    torch.add(y[0], y[1], out=out[1])
    torch.sub(y[0], y[1], out=out[2])
    out[3] = y[1]
