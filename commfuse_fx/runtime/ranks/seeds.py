"""Seeds of divided graphs: every step has another seed, which is the same on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from commfuse_fx.errors import CollectiveError
from commfuse_fx.runtime.ranks.joining.polling import value_of
from commfuse_fx.runtime.ranks.joining.world import world_timeout

_GOLDEN, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class Seeds:
    """The sequence of seeds of one compiled step. Rank 0's default generator decides where it begins.

    The generators of the other ranks do not matter.

    name: the key under which ranks find rank 0's number in the world's store. None for a world in one process.
    """

    def __init__(self, rank: int, name: str | None) -> None:
        self._rank = rank
        self._name = name
        self._first: int | None = None

    def of_step(self, number: int) -> int:
        """The seed of a step, in 0..2**62-1. In their first call, ranks wait for the number of rank 0.

        Raises CollectiveError if rank 0 does not get there within the time-out of the world.
        """
        if self._first is None:
            self._first = self._agree()
        return _mixed(self._first + number * _GOLDEN) >> 2

    def place(self, number: int) -> int | None:
        """Where the sequence stands after step `number`; None before the first step. `go_on` takes it."""
        return None if self._first is None else (self._first + number * _GOLDEN) & _MASK

    def go_on(self, place: int | None, number: int) -> None:
        """After step `number`, go on from a place of this sequence or of another one. None: as it is."""
        if place is not None:
            self._first = (place - number * _GOLDEN) & _MASK

    def _agree(self) -> int:
        own = draw_seed()
        if self._name is None:
            return own
        if self._rank == 0:
            return _publish(self._name, own)
        number = value_of(dist.distributed_c10d._get_default_store(), _key(self._name), world_timeout())
        if number is None:
            raise CollectiveError(
                f"rank {self._rank}: rank 0 has not begun its first step within the time-out: look at its output"
            )
        return int(number)


def draw_seed() -> int:
    """A number from the user's CPU generator, in 0..2**62-1."""
    return int(torch.randint(0, 1 << 62, (1,), device="cpu"))


def release_waiting_ranks(name: str) -> None:
    """Publish rank 0's number if that has not been done, without moving the user's generator.

    Rank 0 calls this when it fails before its first step: other ranks may wait for the number before they vote.
    """
    with torch.random.fork_rng(devices=[]):
        _publish(name, draw_seed())


def _publish(name: str, number: int) -> int:
    """Let ranks read this number of rank 0, unless they can read another one already; returns what they read."""
    return int(dist.distributed_c10d._get_default_store().compare_set(_key(name), "", str(number)))


def _key(name: str) -> str:
    return f"commfuse_fx/seed/{name}"


def _mixed(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
