"""A checksum of the values of tensors, by which ranks see whether they hold the same.

Why: docs/decisions.md, "A vote carries hashes of what ranks should have alike".
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

_CHUNK = 1 << 16
"""Words that are multiplied at a time."""

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
    in_word = 8 // values.element_size()
    count = values.numel() // in_word * in_word
    words, rest = values[:count], values[count:]
    if words.storage_offset() % in_word:  # such words begin in the middle of others
        words = words.clone()
    chunks = [*words.view(torch.int64).split(_CHUNK), rest.view(_BITS[rest.element_size()])]
    factors = _factors(values.device)
    found: list[int] = torch.stack([(chunk * factors[: chunk.numel()]).sum() for chunk in chunks]).tolist()
    return found


@cache
def _factors(device: torch.device) -> torch.Tensor:
    numbers = torch.arange(1, 1 + _CHUNK, device=device) * _GOLDEN
    return (numbers ^ (numbers >> 29)) * _MIX | 1
