"""Random bits of every element of a tensor, which depend on its position in the whole tensor alone.

Every element is a hash of (seed, number of the call, position in the whole tensor), so ranks draw their own parts of
one mask without talking to each other. Seed and call number give two 32-bit keys by SplitMix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014). A position is a row and a column: the whole tensor is
taken as a matrix, so that it has few of both. The numbers of row and column pass the 32-bit mixer lowbias32 (Chris
Wellons, "Prospecting for Hash Functions", 2018, nullprogram.com) with the keys, and their sum passes it once more. So
most of the work is one round of the mixer per element. Without the first round another call would have the same numbers
in another order.

Why: docs/decisions.md, "Random numbers of a divided step come from a counter, not from torch's generator".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from typing import Any

import torch

from commfuse_fx.ir.core.meta import contiguous_stride

_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_STREAMS = 4  # independent numbers per element that one call can draw

_WIDTH = 1024  # columns of the matrix that a vector is taken as

_AT_ONCE = 1 << 17
"""Elements that are mixed at once on a CPU: they stay in its cache from one op to the next."""


def _signed(value: int, bits: int) -> int:
    """The integer of that many bits with the same low bits."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_STEPS = ((16, 0xFFFF, 0x7FEB352D), (15, 0x1FFFF, _signed(0x846CA68B, 32)))
"""The mixer: x ^= (x >> shift) & mask; x *= factor. The masks make the shifts logical."""

_STEPS_ON_CPU = tuple(
    tuple(torch.tensor(number, dtype=torch.int32, device="cpu") for number in step) for step in _STEPS
)
"""The same as tensors. An op makes a tensor of a number, which takes as long as 20,000 elements take in it."""


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


def _is_real_on_cpu(x: torch.Tensor) -> bool:
    """Whether ops on this tensor run now on a CPU. A trace has tensors of its own type, and no cache."""
    return x.device.type == "cpu" and type(x) is torch.Tensor


def _steps(x: torch.Tensor) -> Sequence[Sequence[Any]]:
    return _STEPS_ON_CPU if _is_real_on_cpu(x) else _STEPS


def _mix_(x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Mix int32 values in place by lowbias32 without its last step."""
    for shift, mask, factor in _steps(x):
        torch.bitwise_right_shift(x, shift, out=scratch)
        x.bitwise_xor_(scratch.bitwise_and_(mask)).mul_(factor)
    return x


def _finish_(x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """The last step of lowbias32 in place. It changes the lower halves alone."""
    shift, mask, _ = _steps(x)[0]
    torch.bitwise_right_shift(x, shift, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_(mask))


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
    shape: Sequence[int],
    starts: Sequence[int],
    whole_shape: Sequence[int],
    first: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """The position of every element of a part in the whole tensor, flat, where counting begins at `first`."""
    base, groups = _groups(shape, starts, whole_shape)
    begin, position = base + first, None
    for size, stride in groups or [[1, 1]]:
        offsets = torch.arange(begin, begin + size * stride, stride, dtype=dtype, device=device)
        begin, position = 0, offsets if position is None else (position.unsqueeze(-1) + offsets).view(-1)
    assert position is not None
    return position


@cache
def _leading(whole_shape: tuple[int, ...]) -> int:
    """How many dimensions number the rows of the matrix: it has the fewest rows and columns together."""
    return min(range(len(whole_shape) + 1), key=lambda d: prod(whole_shape[:d]) + prod(whole_shape[d:]))


def _hashed(
    shape: Sequence[int],
    seed: torch.Tensor | int,
    call: int,
    stream: int,
    starts: Sequence[int],
    whole_shape: Sequence[int],
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A hash of each row and one of each column that the part has. Columns are numbered from the last row on."""
    d = _leading(tuple(whole_shape))
    height, width = prod(whole_shape[:d]), prod(whole_shape[d:])
    dtype = torch.int64 if height + width > 1 << 31 else torch.int32
    rows = _positions(shape[:d], starts[:d], whole_shape[:d], 0, dtype, device)
    columns = _positions(shape[d:], starts[d:], whole_shape[d:], height, dtype, device)
    numbers = torch.cat((rows, columns))
    first, second = _keys(int(seed) if _is_real_on_cpu(numbers) else seed, call, stream)
    found = numbers.to(torch.int32).bitwise_xor_(first)
    scratch = torch.empty_like(found)
    _finish_(_mix_(found, scratch), scratch)
    if dtype == torch.int64:
        found += _finish_(_mix_((numbers >> 32).to(torch.int32), scratch), scratch)
    hashed_rows, hashed_columns = found.split((rows.numel(), columns.numel()))
    return hashed_rows.add_(second), hashed_columns


def random_pieces(
    shape: Sequence[int],
    seed: torch.Tensor | int,
    call: int,
    stream: int,
    starts: Sequence[int],
    whole_shape: Sequence[int],
    device: torch.device,
    finish: bool = False,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """An int32 for every element, in pieces of the flat tensor: where a piece is, and its numbers.

    They may be written to, and the next piece overwrites them. Their upper halves are random bits. The lower ones are
    random enough to decide comparisons in which the upper ones tie, or random bits as well with `finish`.
    """
    count, skipped = prod(shape), 0
    if count == 0:
        return
    if sum(size > 1 for size in whole_shape) < 2:  # a vector: the part is covered by rows of a matrix
        start, skipped = divmod(sum(starts), _WIDTH)
        shape, starts = (-(-(skipped + count) // _WIDTH), _WIDTH), (start, 0)
        whole_shape = (-(-prod(whole_shape) // _WIDTH), _WIDTH)
    rows, columns = _hashed(shape, seed, call, stream, starts, whole_shape, device)
    covered = rows.numel() * columns.numel()
    at_once = min(_AT_ONCE, covered) if _is_real_on_cpu(rows) else covered
    memory = rows.new_empty(at_once)
    scratch = torch.empty_like(memory)
    begin = -skipped
    for some_rows in rows.unsqueeze(-1).split(max(at_once // columns.numel(), 1)):
        for some_columns in columns.split(at_once):
            size = some_rows.numel() * some_columns.numel()
            numbers, free = memory[:size], scratch[:size]
            torch.add(some_rows, some_columns, out=numbers.view(some_rows.numel(), some_columns.numel()))
            _mix_(numbers, free)
            if finish:
                _finish_(numbers, free)
            first, last = (min(max(place, 0), count) for place in (begin, begin + size))
            yield slice(first, last), numbers[first - begin : last - begin]
            begin += size


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
    found = torch.empty(tuple(shape), dtype=torch.int32, device=device)
    flat = found.view(-1)
    for where, bits in random_pieces(shape, seed, call, stream, starts, whole_shape, device, finish=True):
        flat[where] = bits
    return found
