"""What the algorithms of collectives do: one formula for each.

Every formula gives the work of an algorithm over k ranks that one level joins: how many messages follow one another,
and how many bytes the busiest rank sends (or receives, which happens at the same time) per byte of payload. A payload
of n bytes then takes `messages * alpha + share * n / bandwidth` seconds.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005);
Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009); Sanders, Speck and
Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009); Hensgen, Finkel and Manber, "Two
algorithms for barrier synchronization" (1988).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple


class Work(NamedTuple):
    """Work is what an algorithm asks of the busiest rank.

    messages: how many follow one another.
    share: bytes that the rank sends or receives, over the payload.
    """

    messages: int
    share: float


Formula = Callable[[int], Work]


def all_reduce_ring(k: int) -> Work:
    """2(k-1) messages, 2(k-1)/k n bytes: reduce_scatter, then all_gather, around a ring. Patarasuk and Yuan 2009."""
    return Work(2 * (k - 1), 2 * (k - 1) / k)


def all_reduce_tree(k: int) -> Work:
    """2 ceil(log2 k) messages, 2n bytes: up and down two binary trees, pipelined. Sanders, Speck and Träff 2009; NCCL.

    Two ranks make no tree: they do what a ring of two does.
    """
    return all_reduce_ring(k) if k == 2 else Work(2 * _log2(k), 2.0)


def all_reduce_recursive(k: int) -> Work:
    """2 log2 k messages, 2(k-1)/k n bytes: recursive halving, then doubling. Thakur, Rabenseifner and Gropp 2005."""
    return Work(2 * _log2(k), 2 * (k - 1) / k)


def shards_ring(k: int) -> Work:
    """k-1 messages, (k-1)/k n bytes: all_gather or reduce_scatter around a ring. Thakur et al. 2005."""
    return Work(k - 1, (k - 1) / k)


def shards_recursive(k: int) -> Work:
    """log2 k messages, (k-1)/k n bytes: all_gather by recursive doubling, reduce_scatter by halving. Thakur et al."""
    return Work(_log2(k), (k - 1) / k)


def rooted_binomial(k: int) -> Work:
    """ceil(log2 k) messages of n bytes each: broadcast or reduce along a binomial tree. Thakur et al. 2005."""
    return Work(_log2(k), float(_log2(k)))


def rooted_ring(k: int) -> Work:
    """k-1 messages, n bytes: broadcast or reduce along a chain, pipelined in pieces. NCCL's ring."""
    return Work(k - 1, 1.0)


def rooted_scatter(k: int) -> Work:
    """ceil(log2 k) + k-1 messages, 2(k-1)/k n bytes: broadcast as scatter, then all_gather. Thakur et al. 2005.

    A reduce the other way round: reduce_scatter, then gather.
    """
    return Work(_log2(k) + k - 1, 2 * (k - 1) / k)


def halves_binomial(k: int) -> Work:
    """ceil(log2 k) messages, (k-1)/k n bytes: gather or scatter along a binomial tree. Thakur et al. 2005."""
    return Work(_log2(k), (k - 1) / k)


def all_to_all_pairwise(k: int) -> Work:
    """k-1 messages, (k-1)/k n bytes: an exchange with each other rank in turn. Thakur et al. 2005."""
    return Work(k - 1, (k - 1) / k)


def barrier_dissemination(k: int) -> Work:
    """ceil(log2 k) messages without bytes. Hensgen, Finkel and Manber 1988."""
    return Work(_log2(k), 0.0)


def send_recv_direct(k: int) -> Work:
    """1 message of n bytes."""
    return Work(1, 1.0)


_SHARDS = {"ring": shards_ring, "recursive": shards_recursive}
_ROOTED = {"tree": rooted_binomial, "ring": rooted_ring, "scatter": rooted_scatter}

FORMULAS: Mapping[str, Mapping[str, Formula]] = MappingProxyType(
    {
        "all_reduce": {"ring": all_reduce_ring, "tree": all_reduce_tree, "recursive": all_reduce_recursive},
        "all_gather": _SHARDS,
        "reduce_scatter": _SHARDS,
        "broadcast": _ROOTED,
        "reduce": _ROOTED,
        "gather": {"tree": halves_binomial},
        "scatter": {"tree": halves_binomial},
        "all_to_all": {"pairwise": all_to_all_pairwise},
        "barrier": {"dissemination": barrier_dissemination},
        "send_recv": {"direct": send_recv_direct},
    }
)
COLLECTIVES = tuple(FORMULAS)
"""The kinds that `collective_cost` takes."""


def fits(algorithm: str, ranks: int) -> bool:
    """Whether an algorithm applies to so many ranks."""
    return algorithm != "recursive" or ranks & (ranks - 1) == 0


def _log2(k: int) -> int:
    """Rounded up."""
    return (k - 1).bit_length()
