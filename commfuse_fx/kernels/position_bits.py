"""Random bits of every element of a tensor, which depend on its position in the whole tensor alone.

Every element is a hash of (seed, number of the call, position in the whole tensor), so ranks draw their own parts of
one mask without talking to each other. Seed and call number give two 64-bit keys by SplitMix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014); the position passes two keyed rounds of the 32-bit
mixer lowbias32 (Chris Wellons, "Prospecting for Hash Functions", 2018, nullprogram.com). One round is not enough: the
same mixer with another key would give another call the same numbers in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from commfuse_fx.ir.meta import contiguous_stride

_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_STREAMS = 4  # independent numbers per element that one call can draw

_AT_ONCE = 1 << 16
"""Elements that are mixed at once on a CPU: they stay in its cache from one op to the next."""


def _signed(value: int, bits: int) -> int:
    """The integer of that many bits with the same low bits."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _splitmix64(z: int) -> int:
    """The generator's output for the state z, 64 bits."""
    mask = (1 << 64) - 1
    z = (z ^ (z >> 30)) * _FACTORS[0] & mask
    z = (z ^ (z >> 27)) * _FACTORS[1] & mask
    return z ^ (z >> 31)


def _splitmix64_tensor(z: torch.Tensor) -> torch.Tensor:
    """The same on an int64 tensor, whose shifts copy the sign, which the masks take away."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _signed(_FACTORS[0], 64)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _signed(_FACTORS[1], 64)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _keys(seed: torch.Tensor | int, call: int, stream: int) -> tuple[torch.Tensor | int, torch.Tensor | int]:
    """Two int32 keys: SplitMix64's output number `call * _STREAMS + stream` from this seed, cut in halves."""
    step = (call * _STREAMS + stream + 1) * _GOLDEN
    if isinstance(seed, torch.Tensor):
        mixed = _splitmix64_tensor(seed + _signed(step, 64))
        return mixed.to(torch.int32), (mixed >> 32).to(torch.int32)
    key = _splitmix64((seed + step) % (1 << 64))
    return _signed(key, 32), _signed(key >> 32, 32)


def _lowbias32_(x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Mix int32 values in place. Shifts are made logical by the masks, products wrap around."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        torch.bitwise_right_shift(x, shift, out=scratch)
        x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))
        if factor != 1:
            x.mul_(_signed(factor, 32))
    return x


def _groups(shape: Sequence[int], starts: Sequence[int], whole_shape: Sequence[int]) -> tuple[int, list[list[int]]]:
    """Position of the part's first element, and [size, stride] of as few dimensions as describe the others'."""
    strides = contiguous_stride(whole_shape)
    base = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    groups: list[list[int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if groups and groups[-1][1] == size * stride:
            groups[-1] = [groups[-1][0] * size, stride]
        elif size != 1:
            groups.append([size, stride])
    return base, groups


def _positions(
    shape: Sequence[int], starts: Sequence[int], whole_shape: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Low and high 32 bits of every element's position in the whole tensor, flat; None for high bits that are all 0."""
    base, groups = _groups(shape, starts, whole_shape)
    wide = prod(whole_shape) > 1 << 31
    dtype = torch.int64 if wide else torch.int32
    position = torch.full((1,), base, dtype=dtype, device=device)
    for number, (size, stride) in enumerate(groups):
        first = base if number == 0 else 0
        offsets = torch.arange(first, first + size * stride, stride, dtype=dtype, device=device)
        position = offsets if number == 0 else position.unsqueeze(-1) + offsets
    position = position.reshape(-1)[: prod(shape)]
    return (position.to(torch.int32), (position >> 32).to(torch.int32)) if wide else (position, None)


def random_bits(
    shape: Sequence[int],
    seed: torch.Tensor | int,
    call: int,
    stream: int,
    starts: Sequence[int],
    whole_shape: Sequence[int],
    device: torch.device,
) -> torch.Tensor:
    """32 random bits for every element, as int32."""
    first, second = _keys(seed, call, stream)
    x, high = _positions(shape, starts, whole_shape, device)
    is_cached = x.device.type == "cpu" and type(x) is torch.Tensor  # a trace has tensors of its own, and no cache
    at_once = _AT_ONCE if is_cached else max(x.numel(), 1)
    scratch = torch.empty_like(x[:at_once])
    highs = [None] * -(-x.numel() // at_once) if high is None else high.split(at_once)
    for low, upper in zip(x.split(at_once), highs, strict=False):
        _mix_(low, upper, first, second, scratch[: low.numel()])
    return x.view(tuple(shape))


def _mix_(
    x: torch.Tensor,
    high: torch.Tensor | None,
    first: torch.Tensor | int,
    second: torch.Tensor | int,
    scratch: torch.Tensor,
) -> None:
    """Make positions the random bits that they have, in place."""
    _lowbias32_(x.bitwise_xor_(first), scratch).add_(second)
    if high is not None:
        x.add_(_lowbias32_(high, scratch))
    _lowbias32_(x, scratch)
