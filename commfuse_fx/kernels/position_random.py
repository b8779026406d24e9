"""Random numbers that depend on the position in the whole tensor, not on how or in which order it is made.

In all functions: `seed` is an int or an int64 tensor of no dimensions; `call` an int constant per place in the program;
`starts` says where this rank's part begins in every dimension, `whole_shape` is the shape of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import pi
from typing import Any

import torch

from commfuse_fx.ir.core.functions import InnerOps, pure
from commfuse_fx.kernels.position_bits import random_bits, random_pieces


def _uniform(
    shape: Sequence[int],
    seed: torch.Tensor | int,
    call: int,
    streams: tuple[int, int],
    starts: Sequence[int],
    whole_shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Multiples of 2^-m in [0, 1), where m is the number of digits that the type can hold in [0.5, 1)."""
    bits = random_bits(shape, seed, call, streams[0], starts, whole_shape, device)
    digits = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}[dtype]
    if digits > 32:
        low = random_bits(shape, seed, call, streams[1], starts, whole_shape, device)
        high = bits.to(dtype).add_(1 << 31).mul_(1 << (digits - 32))
        return low.bitwise_right_shift_(64 - digits).to(dtype).add_(high).add_(1 << (digits - 33)).mul_(2.0**-digits)
    return bits.bitwise_right_shift_(32 - digits).to(dtype).mul_(2.0**-digits).add_(0.5)


def _below_(bits: torch.Tensor, p: float) -> torch.Tensor:
    """Make random bits 1 with probability p, a multiple of 2^-32, otherwise 0.

    A comparison that keeps the type is vectorized on a CPU, and one that gives bools is not.
    """
    threshold = round(p * (1 << 32)) - (1 << 31)  # of all 2^32 values of an int32, the part p is below this
    return bits.fill_(1) if threshold >= 1 << 31 else bits.lt_(threshold)


@pure
def shift(start: int, index: int, size: int) -> int:
    """Where the part of rank `index` begins, if parts of this size divide what begins at `start`."""
    return start + index * size


def dropout_at(
    x: torch.Tensor,
    p: float,
    seed: torch.Tensor | int,
    call: int,
    starts: Sequence[int],
    whole_shape: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """native_dropout in training: x * mask / (1 - p), and the mask (bool), which is False with probability p."""
    if not x.is_contiguous():
        out, mask = dropout_at(x.contiguous(), p, seed, call, starts, whole_shape)
        return torch.empty_like(x).copy_(out), mask
    scale = 0.0 if p == 1 else 1 / (1 - p)
    out, mask = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    flat_x, flat_out, flat_mask = x.view(-1), out.view(-1), mask.view(-1)
    for where, bits in random_pieces(x.shape, seed, call, 0, starts, whole_shape, x.device):
        kept = _below_(bits, 1 - p)
        flat_mask[where] = kept
        torch.mul(flat_x[where], kept.to(x.dtype), out=flat_out[where]).mul_(scale)
    return out, mask


def uniform_at(
    shape: Sequence[int],
    low: float,
    high: float,
    seed: torch.Tensor | int,
    call: int,
    starts: Sequence[int],
    whole_shape: Sequence[int],
    dtype: torch.dtype,
    device: str,
) -> torch.Tensor:
    """Uniform in [low, high)."""
    found = _uniform(shape, seed, call, (0, 1), starts, whole_shape, dtype, torch.device(device))
    if (low, high) == (0.0, 1.0):
        return found
    scaled = found.mul_(high - low).add_(low)
    return scaled.masked_fill_(scaled >= high, low) if high > low else scaled  # rounding may have reached `high`


def normal_at(
    shape: Sequence[int],
    mean: float,
    std: float,
    seed: torch.Tensor | int,
    call: int,
    starts: Sequence[int],
    whole_shape: Sequence[int],
    dtype: torch.dtype,
    device: str,
) -> torch.Tensor:
    """Normal, by Box and Muller ("A note on the generation of random normal deviates", 1958)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    where = torch.device(device)
    radius = _uniform(shape, seed, call, (0, 1), starts, whole_shape, wide, where)
    angle = _uniform(shape, seed, call, (2, 3), starts, whole_shape, wide, where)
    radius = radius.neg_().add_(1).log_().mul_(-2).sqrt_()
    return angle.mul_(2 * pi).cos_().mul_(radius).mul_(std).add_(mean).to(dtype)


def exponential_at(
    shape: Sequence[int],
    rate: float,
    seed: torch.Tensor | int,
    call: int,
    starts: Sequence[int],
    whole_shape: Sequence[int],
    dtype: torch.dtype,
    device: str,
) -> torch.Tensor:
    """Exponential with mean 1 / rate, never 0, which users take the logarithm of."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    found = _uniform(shape, seed, call, (0, 1), starts, whole_shape, wide, torch.device(device))
    smallest = torch.finfo(dtype).eps / 2
    return found.neg_().log1p_().neg_().clamp_(min=smallest).div_(rate).to(dtype)


def bernoulli_at(
    shape: Sequence[int],
    p: float,
    seed: torch.Tensor | int,
    call: int,
    starts: Sequence[int],
    whole_shape: Sequence[int],
    dtype: torch.dtype,
    device: str,
) -> torch.Tensor:
    """1 with probability p, otherwise 0."""
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    flat = out.view(-1)
    for where, bits in random_pieces(shape, seed, call, 0, starts, whole_shape, out.device):
        flat[where] = _below_(bits, p)
    return out


def bernoulli_of_at(
    probability: torch.Tensor, seed: torch.Tensor | int, call: int, starts: Sequence[int], whole_shape: Sequence[int]
) -> torch.Tensor:
    """1 with the probability that stands in each element, otherwise 0; in the type of the probabilities."""
    wide = torch.float64 if probability.dtype == torch.float64 else torch.float32
    found = _uniform(probability.shape, seed, call, (0, 1), starts, whole_shape, wide, probability.device)
    return (found < probability).to(probability.dtype)


def randint_at(
    shape: Sequence[int],
    low: int,
    high: int,
    seed: torch.Tensor | int,
    call: int,
    starts: Sequence[int],
    whole_shape: Sequence[int],
    dtype: torch.dtype,
    device: str,
) -> torch.Tensor:
    """Integers in [low, high). Probabilities are off by at most (high - low) / 2^32 of themselves (Lemire, "Fast random
    integer generation in an interval", 2019, without the rejection), by (high - low) / 2^63 beyond 2^31 values."""
    where, count = torch.device(device), high - low
    bits = random_bits(shape, seed, call, 0, starts, whole_shape, where).to(torch.int64)
    if count <= 1 << 31:
        found = bits.add_(1 << 31).mul_(count).bitwise_right_shift_(32)
    else:
        rest = random_bits(shape, seed, call, 1, starts, whole_shape, where).to(torch.int64)
        found = bits.bitwise_and_((1 << 31) - 1).mul_(1 << 32).add_(rest.add_(1 << 31)).remainder_(count)
    return found.add_(low).to(dtype)


def randperm_at(count: int, seed: torch.Tensor | int, call: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A permutation of 0 ... count - 1: the order of 64-bit random numbers. The same on all ranks, never divided."""
    where = torch.device(device)
    high = random_bits((count,), seed, call, 0, (0,), (count,), where).to(torch.int64)
    low = random_bits((count,), seed, call, 1, (0,), (count,), where).to(torch.int64)
    return high.mul_(1 << 32).add_(low).argsort(stable=True).to(dtype)


_INNER: dict[Callable[..., Any], InnerOps] = {
    dropout_at: InnerOps(46, 30),
    uniform_at: InnerOps(53, 45),
    normal_at: InnerOps(108, 97),
    exponential_at: InnerOps(54, 48),
    bernoulli_at: InnerOps(43, 25),
    bernoulli_of_at: InnerOps(51, 41),
    randint_at: InnerOps(50, 24),
    randperm_at: InnerOps(95, 44),
}
"""What drawing such numbers runs for float32 and int64. Ops on rows and columns count among ops, not among passes."""

for _function, _inner in _INNER.items():
    pure(_function, _inner)
