"""Checks of the levels of a cluster: the figures of each, and that they form a network of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.machine.bounds import BYTES, MOST_RANKS, SECONDS, SECONDS_PER_BYTE, SPEED, SPEED_OR_NONE
from commfuse_fx.machine.cluster_parts import Level
from commfuse_fx.support.checks import check_int, check_text, is_int, show

Domains = int | tuple[tuple[int, ...], ...] | None
"""The blocks of ranks that a level joins, as a `Level` gives them."""


def checked_levels(levels: object, ranks: int | None) -> tuple[Level, ...]:
    if not isinstance(levels, (tuple, list)):
        raise ConfigTypeError(f"levels is {show(levels)}; give a tuple of Level")
    if not levels:
        raise ConfigValueError("levels is empty; give at least one Level, which joins all ranks")
    checked = [_checked_level(level, f"levels[{i}]", ranks) for i, level in enumerate(levels)]
    names = [level.name for level in checked]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ConfigValueError(f'levels[{i}].name is "{name}", as is that of another level; give each its own')
    return tuple(checked)


def _checked_level(level: object, where: str, ranks: int | None) -> Level:
    if not isinstance(level, Level):
        raise ConfigTypeError(f"{where} is {show(level)}; give a Level")
    check_text(level.name, f"{where}.name")
    return replace(
        level,
        domains=_checked_domains(level.domains, f"{where}.domains", ranks),
        alpha=SECONDS.check(level.alpha, f"{where}.alpha"),
        bandwidth=SPEED.check(level.bandwidth, f"{where}.bandwidth"),
        host_seconds_per_byte=SECONDS_PER_BYTE.check(level.host_seconds_per_byte, f"{where}.host_seconds_per_byte"),
        burst_bytes=BYTES.check(level.burst_bytes, f"{where}.burst_bytes"),
        burst_bandwidth=_checked_burst(level, where),
        alpha_busy=_checked_alpha_busy(level, where),
        bandwidth_busy=_checked_bandwidth_busy(level, where),
        source=check_text(level.source, f"{where}.source", empty=True),
    )


def _checked_burst(level: Level, where: str) -> float:
    speed = SPEED_OR_NONE.check(level.burst_bandwidth, f"{where}.burst_bandwidth")
    if (speed > 0) != (level.burst_bytes > 0) or (speed and speed < level.bandwidth):
        raise ConfigValueError(
            f"{where}.burst_bandwidth is {show(speed)} with burst_bytes {show(level.burst_bytes)} and bandwidth "
            f"{show(level.bandwidth)}; give both 0, or some bytes and a speed that is not below the bandwidth"
        )
    return speed


def _checked_alpha_busy(level: Level, where: str) -> float:
    busy = SECONDS.check(level.alpha_busy, f"{where}.alpha_busy")
    if busy and not level.alpha:
        raise ConfigValueError(
            f"{where}.alpha_busy is {show(busy)} with alpha 0; give alpha too: what a message takes while the rank "
            "waits, such as 1e-7"
        )
    if busy and busy < level.alpha:
        raise ConfigValueError(
            f"{where}.alpha_busy is {show(busy)}, below alpha {show(level.alpha)}; give 0 where computing makes no "
            "difference to a message, or more than alpha"
        )
    return busy


def _checked_bandwidth_busy(level: Level, where: str) -> float:
    busy = SPEED_OR_NONE.check(level.bandwidth_busy, f"{where}.bandwidth_busy")
    if busy > level.bandwidth:
        raise ConfigValueError(
            f"{where}.bandwidth_busy is {show(busy)}, above bandwidth {show(level.bandwidth)}; give 0 where computing "
            "makes no difference"
        )
    return busy


def _checked_domains(domains: object, where: str, ranks: int | None) -> Domains:
    """The domains of one level by themselves: a partition of the ranks."""
    if domains is None:
        return None
    if is_int(domains):
        check_int(domains, where, 1, MOST_RANKS)
        if ranks is not None and ranks % domains and domains < ranks:
            raise ConfigValueError(
                f"{where} is {domains}, which does not divide the {ranks} ranks; give a divisor, or list the domains"
            )
        return domains
    if not isinstance(domains, (tuple, list)) or not all(isinstance(domain, (tuple, list)) for domain in domains):
        raise ConfigTypeError(f"{where} is {show(domains)}; give a block size, a tuple of tuples of ranks, or None")
    if ranks is None:
        raise ConfigValueError(f"{where} lists ranks, but ranks is None; give ranks, the number of all ranks")
    found: dict[int, int] = {}
    for i, domain in enumerate(domains):
        if not domain:
            raise ConfigValueError(f"{where}[{i}] is empty; leave it out")
        for rank in domain:
            check_int(rank, f"{where}[{i}] has a rank that", 0, ranks - 1, f" (ranks is {ranks})")
            if found.get(rank) == i:
                raise ConfigValueError(f"{where}[{i}] has rank {rank} twice; give it once")
            if rank in found:
                raise ConfigValueError(
                    f"{where}[{i}] overlaps {where}[{found[rank]}]: both have rank {rank}; give each rank one domain"
                )
            found[rank] = i
    if len(found) < ranks:
        missing = next(rank for rank in range(ranks) if rank not in found)
        raise ConfigValueError(f"{where} skips rank {missing}; give every rank a domain, if only one of its own")
    return tuple(tuple(domain) for domain in domains)


def domain_table(domains: Domains) -> tuple[int, ...] | None:
    """The domain of each rank, for domains that are listed."""
    if not isinstance(domains, tuple):
        return None
    return tuple(i for _, i in sorted((rank, i) for i, domain in enumerate(domains) for rank in domain))


def check_network(levels: Sequence[Level], ranks: int | None, tables: Sequence[tuple[int, ...] | None]) -> None:
    """The levels together: they nest, and the last one joins all ranks."""
    for i in range(len(levels) - 1):
        # A block size that covers a small cluster is fine, a forgotten one is not.
        if levels[i].domains is None:
            raise ConfigValueError(
                f'levels[{i}] "{levels[i].name}" with domains None joins all ranks, so that levels[{i + 1}] '
                f'"{levels[i + 1].name}" would carry nothing; give the ranks that it joins as domains, or leave out '
                "one of the levels"
            )
        _check_nesting(i, levels, ranks, tables)
    last, where = levels[-1], f"levels[{len(levels) - 1}]"
    if not _joins_all(last, ranks):
        raise ConfigValueError(
            f'a level is missing: the last one, {where} "{last.name}" with domains {show(last.domains)}, does not join '
            "all ranks; add a level with domains=None"
        )


def _joins_all(level: Level, ranks: int | None) -> bool:
    domains = level.domains
    if isinstance(domains, int):
        return ranks is not None and domains >= ranks
    return domains is None or len(domains) == 1


def _check_nesting(
    i: int, levels: Sequence[Level], ranks: int | None, tables: Sequence[tuple[int, ...] | None]
) -> None:
    inner, outer = levels[i].domains, levels[i + 1].domains
    if outer is None:
        return
    if isinstance(inner, int) and isinstance(outer, int):
        nested = outer % inner == 0 or (ranks is not None and outer >= ranks)
    else:
        assert ranks is not None, "levels that list ranks say how many there are"
        pairs = [(domain_of(inner, tables[i], rank), domain_of(outer, tables[i + 1], rank)) for rank in range(ranks)]
        holder = dict(pairs)
        nested = all(holder[inside] == outside for inside, outside in pairs)
    if not nested:
        raise ConfigValueError(
            f"levels[{i}].domains {show(inner)} do not nest in levels[{i + 1}].domains {show(outer)}; give levels from "
            "the innermost to the outermost, each domain inside one of the next level"
        )


def domain_of(domains: Domains, table: tuple[int, ...] | None, rank: int) -> int:
    """The number of the domain that holds a rank; `table` as `domain_table` gives it."""
    if table is not None:
        return table[rank]
    return rank // domains if isinstance(domains, int) else 0
