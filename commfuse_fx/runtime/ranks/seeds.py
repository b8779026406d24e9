"""The seed of every step of a divided graph: the same on all ranks, another one at every step."""

from __future__ import annotations

import torch
import torch.distributed as dist

_GOLDEN, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class Seeds:
    """Steps draw from a sequence that begins with a number of the user's generator, on rank 0: that of
    torch.manual_seed. The ranks' own generators may stand anywhere.

    name: where the ranks find the first number in the world's store, the same on all ranks; None for one process.
    """

    def __init__(self, rank: int, name: str | None) -> None:
        self._rank = rank
        self._name = name
        self._first: int | None = None

    def of_step(self, number: int) -> int:
        """The seed of a step, in 0..2**62-1. The first call of all ranks waits for rank 0's."""
        if self._first is None:
            self._first = self._agree()
        return _mixed(self._first + number * _GOLDEN) >> 2

    def _agree(self) -> int:
        own = int(torch.randint(0, 1 << 62, (1,)))
        if self._name is None:
            return own
        store = dist.distributed_c10d._get_default_store()
        key = f"commfuse_fx/seed/{self._name}"
        if self._rank == 0:
            store.set(key, str(own))
        return int(store.get(key))


def _mixed(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
