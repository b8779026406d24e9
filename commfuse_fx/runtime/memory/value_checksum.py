"""A checksum of the values of tensors, by which ranks see whether they hold the same."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_CHUNK = 1 << 18
"""Elements that are multiplied at a time."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GOLDEN, _MIX = -7046029254386353131, -4658895280553007687  # odd numbers of splitmix64


def value_checksum(tensors: Iterable[torch.Tensor]) -> int:
    """A checksum of these values, bit for bit and in their places, in 1..2**62-1."""
    total = 1
    for tensor in tensors:
        for part in _parts(tensor):
            total = (total * 31 + part) % ((1 << 62) - 1)
    return total or 1


def _parts(tensor: torch.Tensor) -> list[int]:
    """Of each chunk of the values the sum of products with numbers that are fixed. The sums wrap around."""
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    values = values.resolve_neg().contiguous().view(-1)
    chunks = values.view(_BITS[values.element_size()]).split(_CHUNK)
    factors = torch.arange(1, 1 + min(_CHUNK, values.numel()), device=values.device) * _GOLDEN
    factors = (factors ^ (factors >> 29)) * _MIX | 1
    sums = [(chunk.to(torch.int64) * factors[: chunk.numel()]).sum() for chunk in chunks]
    found: list[int] = torch.stack(sums).tolist()
    return found
