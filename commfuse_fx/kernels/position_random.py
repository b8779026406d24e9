"""Random numbers that depend on the position in the whole tensor, not on how or in which order it is made.

Every element is a hash of (seed, number of the call, position in the whole tensor), so ranks draw their own parts of
one mask without talking to each other. Seed and call number give two 64-bit keys by SplitMix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014); the position passes two keyed rounds of the 32-bit
mixer lowbias32 (Chris Wellons, "Prospecting for Hash Functions", 2018, nullprogram.com). One round is not enough: the
same mixer with another key would give another call the same numbers in another order.

In all functions: `seed` is an int or an int64 tensor of no dimensions; `call` an int constant per place in the program;
`starts` says where this rank's part begins in every dimension, `whole_shape` is the shape of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import pi, prod
from typing import Any

import torch

from commfuse_fx.ir.functions import pure
from commfuse_fx.ir.meta import TensorSpec, contiguous_stride

aten = torch.ops.aten

_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_STREAMS = 4  # independent numbers per element that one call can draw


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


def _random_bits(
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
    scratch = torch.empty_like(x)
    _lowbias32_(x.bitwise_xor_(first), scratch).add_(second)
    if high is not None:
        x.add_(_lowbias32_(high, scratch))
    return _lowbias32_(x, scratch).view(tuple(shape))


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
    bits = _random_bits(shape, seed, call, streams[0], starts, whole_shape, device)
    digits = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}[dtype]
    if digits > 32:
        low = _random_bits(shape, seed, call, streams[1], starts, whole_shape, device)
        high = bits.to(dtype).add_(1 << 31).mul_(1 << (digits - 32))
        return low.bitwise_right_shift_(64 - digits).to(dtype).add_(high).add_(1 << (digits - 33)).mul_(2.0**-digits)
    return bits.bitwise_right_shift_(32 - digits).to(dtype).mul_(2.0**-digits).add_(0.5)


def _threshold(p: float) -> int:
    """Of all 2^32 values of an int32, the part p is below this."""
    return round(p * (1 << 32)) - (1 << 31)


def _is_below(bits: torch.Tensor, p: float) -> torch.Tensor:
    """True with probability p, a multiple of 2^-32."""
    threshold = _threshold(p)
    if threshold >= 1 << 31:
        return torch.ones_like(bits, dtype=torch.bool)
    return bits < threshold


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
    bits = _random_bits(x.shape, seed, call, 0, starts, whole_shape, x.device)
    mask = _is_below(bits, 1 - p)
    return (x * mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask


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
    bits = _random_bits(shape, seed, call, 0, starts, whole_shape, torch.device(device))
    return _is_below(bits, p).to(dtype)


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
    bits = _random_bits(shape, seed, call, 0, starts, whole_shape, where).to(torch.int64)
    if count <= 1 << 31:
        found = bits.add_(1 << 31).mul_(count).bitwise_right_shift_(32)
    else:
        rest = _random_bits(shape, seed, call, 1, starts, whole_shape, where).to(torch.int64)
        found = bits.bitwise_and_((1 << 31) - 1).mul_(1 << 32).add_(rest.add_(1 << 31)).remainder_(count)
    return found.add_(low).to(dtype)


def randperm_at(count: int, seed: torch.Tensor | int, call: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A permutation of 0 ... count - 1: the order of 64-bit random numbers. The same on all ranks, never divided."""
    where = torch.device(device)
    high = _random_bits((count,), seed, call, 0, (0,), (count,), where).to(torch.int64)
    low = _random_bits((count,), seed, call, 1, (0,), (count,), where).to(torch.int64)
    return high.mul_(1 << 32).add_(low).argsort(stable=True).to(dtype)


_PURE: tuple[Callable[..., Any], ...] = (
    shift,
    dropout_at,
    uniform_at,
    normal_at,
    exponential_at,
    bernoulli_at,
    bernoulli_of_at,
    randint_at,
    randperm_at,
)
for _function in _PURE:
    pure(_function)


@dataclass(frozen=True)
class Replacement:
    """What stands in for a random op.

    convert(arguments, spec, seed, call) gives the arguments of `function` for a whole tensor. `arguments` are those of
    the op by the names of its schema, defaults filled in; spec: of the op's first result; seed and tensors may be
    anything that stands for them, such as graph nodes. It gives None for a call that draws nothing or that cannot be
    replaced (a generator of the user's own): that call stays as it is.
    """

    function: Callable[..., Any]
    convert: Callable[[dict[str, Any], TensorSpec, Any, int], tuple[Any, ...] | None]


def counter_based(target: Any) -> Replacement | None:
    """What stands in for this random op; None for ops without a replacement."""
    return _REPLACEMENTS.get(target)


def _from_start(spec: TensorSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (0,) * len(spec.shape), spec.shape


def _native_dropout(given: dict[str, Any], spec: TensorSpec, seed: Any, call: int) -> tuple[Any, ...] | None:
    if given["train"] is False:
        return None
    return (given["input"], given["p"], seed, call, *_from_start(spec))


def _bernoulli_of(given: dict[str, Any], spec: TensorSpec, seed: Any, call: int) -> tuple[Any, ...] | None:
    if given.get("generator") is not None:
        return None
    return (given["self"], seed, call, *_from_start(spec))


def _permutation(given: dict[str, Any], spec: TensorSpec, seed: Any, call: int) -> tuple[Any, ...] | None:
    if given.get("generator") is not None:
        return None
    return (given["n"], seed, call, spec.dtype, spec.device)


def _filling(*parameters: str | float) -> Callable[..., tuple[Any, ...] | None]:
    """For functions of (shape, *parameters, ...); a parameter is a constant or the name of an argument."""

    def convert(given: dict[str, Any], spec: TensorSpec, seed: Any, call: int) -> tuple[Any, ...] | None:
        if given.get("generator") is not None or spec.dtype.is_complex:
            return None
        values = tuple(given[each] if isinstance(each, str) else each for each in parameters)
        if None in values:
            return None
        return (spec.shape, *values, seed, call, *_from_start(spec), spec.dtype, spec.device)

    return convert


_UNIFORM = Replacement(uniform_at, _filling(0.0, 1.0))
_NORMAL = Replacement(normal_at, _filling(0.0, 1.0))
_INTEGERS = Replacement(randint_at, _filling(0, "high"))
_INTEGERS_FROM = Replacement(randint_at, _filling("low", "high"))

_REPLACEMENTS: dict[Any, Replacement] = {
    aten.native_dropout.default: Replacement(dropout_at, _native_dropout),
    aten.rand.default: _UNIFORM,
    aten.rand_like.default: _UNIFORM,
    aten.uniform.default: Replacement(uniform_at, _filling("from", "to")),
    aten.randn.default: _NORMAL,
    aten.randn_like.default: _NORMAL,
    aten.normal_functional.default: Replacement(normal_at, _filling("mean", "std")),
    aten.normal.float_float: Replacement(normal_at, _filling("mean", "std")),
    aten.exponential.default: Replacement(exponential_at, _filling("lambd")),
    aten.bernoulli.p: Replacement(bernoulli_at, _filling("p")),
    aten.bernoulli.default: Replacement(bernoulli_of_at, _bernoulli_of),
    aten.randint.default: _INTEGERS,
    aten.randint.low: _INTEGERS_FROM,
    aten.randint_like.default: _INTEGERS,
    aten.randint_like.low_dtype: _INTEGERS_FROM,
    aten.random.to: Replacement(randint_at, _filling(0, "to")),
    getattr(aten.random, "from"): Replacement(randint_at, _filling("from", "to")),
    aten.randperm.default: Replacement(randperm_at, _permutation),
}
