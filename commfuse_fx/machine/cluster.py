"""The machine that a step is priced for: devices, and the levels of the network between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.machine.bounds import (
    BYTES,
    FLOPS,
    MOST_BYTES,
    MOST_RANKS,
    SECONDS,
    SECONDS_PER_BYTE,
    SPEED,
    SPEED_OR_NONE,
)
from commfuse_fx.support.checks import check_int, is_int, show
from commfuse_fx.support.documents import Document, check_keys, check_object, check_text, made_of

_Spec = TypeVar("_Spec", "Level", "Device")


@dataclass(frozen=True, kw_only=True)
class Level:
    """One level of the network: the ranks that it joins directly, and what a message over it costs.

    name: such as "nvlink", "infiniband", "tcp".
    domains: lists of ranks, each joined by links of this level; or an int n for consecutive blocks of n ranks; or
        None for all ranks. Levels go from the innermost (fastest) to the outermost, which joins all ranks.
    alpha: seconds that a message takes before its first byte arrives.
    alpha_busy: the same while the rank computes all the time, where threads of the backend wait for the core that it
        computes on; 0 where computing makes no difference.
    bandwidth: bytes per second that one rank can send, and at the same time receive, over this level, while all
        other ranks do the same. Ranks that share one network card have its bandwidth divided by their number.
    bandwidth_busy: the same while the rank computes all the time, where threads of the backend that move the bytes get
        the core in turn with it; 0 where computing makes no difference.
    host_seconds_per_byte: seconds of the device's compute that moving one byte takes away (a CPU backend copies
        and adds on the core that computes; 0 where hardware moves the data).
    burst_bytes, burst_bandwidth: bytes that a link carries at once after a pause, and at how many bytes per second,
        where the network is a faster one with a limit (a token bucket); 0 where it is not. What has been carried in
        a burst is earned again at `bandwidth`. Groups that span several levels are priced without.
    source: where the figures come from.

    The fields are checked by the ClusterSpec that the level is put into, whose errors can say which level it is.
    """

    name: str
    domains: int | tuple[tuple[int, ...], ...] | None = None
    alpha: float
    bandwidth: float
    host_seconds_per_byte: float = 0.0
    burst_bytes: float = 0.0
    burst_bandwidth: float = 0.0
    alpha_busy: float = 0.0
    bandwidth_busy: float = 0.0
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one rank computes with.

    flops: FLOP per second that large matrix products reach, by dtype name ("f64", "f32", "bf16", "f16", ...).
    memory_bandwidth: bytes per second. memory_bytes: capacity. op_overhead: seconds that any op takes at least.
    collective_overhead: seconds of compute that each message costs besides its bytes: to hand it over, to wake the
        backend's threads on the core that computes, and to wait for it.
    source: where the figures come from.

    The fields are checked by the ClusterSpec that the device is put into.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    memory_bytes: int
    op_overhead: float
    collective_overhead: float = 0.0
    source: str = ""


@dataclass(frozen=True, slots=True)
class GroupSplit:
    """How a group of ranks lies in a cluster.

    size: ranks of the group. levels: the levels that messages between its ranks use, from the innermost on.
    parts: for each of these levels, how many parts it joins, each part being what the levels inside it have joined.
        Their product is `size`. None when the parts are not the same everywhere (5 ranks of one host, 3 of another).
    memo: room for what is derived from the split, so that it is derived once.
    """

    size: int
    levels: tuple[Level, ...]
    parts: tuple[int, ...] | None
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class ClusterSpec(Document, kind="cluster"):
    """A cluster of equal devices. `ranks` None: as many as the step has (a preset of one host per rank, say).

    notes: free remarks, by topic.

    Numbers come out as floats, lists as tuples. Raises ConfigTypeError or ConfigValueError, naming the field, for
    figures that no machine has (`cost/bounds.py`: a bandwidth of 0, an alpha of more than 1000 seconds) and for levels
    that do not form a network: each level has every rank once, each domain lies inside one domain of the next level,
    and the last level joins all ranks.
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    ranks: int | None = None
    notes: Mapping[str, str] = field(default_factory=dict, hash=False)
    _splits: dict[tuple[int, ...], GroupSplit] = field(default_factory=dict, init=False, repr=False, compare=False)
    _domain_of: tuple[tuple[int, ...] | None, ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_text(self.name, "name")
        if self.ranks is not None:
            check_int(self.ranks, "ranks", 1, MOST_RANKS)
        levels = _checked_levels(self.levels, self.ranks)
        object.__setattr__(self, "levels", levels)
        object.__setattr__(self, "device", _checked_device(self.device))
        object.__setattr__(self, "notes", _checked_notes(self.notes))
        object.__setattr__(self, "_domain_of", tuple(_domain_table(level.domains) for level in levels))
        _check_network(levels, self.ranks, self._domain_of)

    def check_ranks(self, ranks: Sequence[int]) -> None:
        """Whether a group can be one of this cluster.

        Raises ConfigTypeError for a rank that is no int, and ConfigValueError for a group that is empty, has a rank
        twice, or has ranks that the cluster does not have.
        """
        if not ranks:
            raise ConfigValueError(f"the group is empty; give at least one rank of cluster {self.name}")
        for rank in ranks:
            if not is_int(rank):
                raise ConfigTypeError(f"the group has rank {show(rank)}; give ints")
        low, high = min(ranks), max(ranks)
        if low < 0:
            raise ConfigValueError(f"the group has rank {low}; ranks begin at 0")
        if self.ranks is not None and high >= self.ranks:
            raise ConfigValueError(
                f"the group has rank {high}, but cluster {self.name} has {self.ranks} ranks (0..{self.ranks - 1}); "
                "give a larger cluster or a smaller world"
            )
        if len(set(ranks)) != len(ranks):
            raise ConfigValueError(f"the group {show(tuple(ranks))} has a rank twice; give each rank once")

    def split(self, ranks: Sequence[int]) -> GroupSplit:
        """The levels that a group spans; computed once per group. Raises like `check_ranks`.

        Two ranks talk over the innermost level that has both in one domain. So a group with one rank of each host
        only spans the network between the hosts, and one that lies in one host only the links inside it.
        """
        if not isinstance(ranks, Sequence):
            raise ConfigTypeError(f"the group is {show(ranks)}; give a sequence of ranks")
        key = tuple(ranks)
        try:
            return self._splits[key]
        except (KeyError, TypeError):  # not known yet, or holds what cannot be hashed
            self.check_ranks(key)
        found = self._splits[key] = self._split(key)
        return found

    def distinct(self, groups: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """One group of each way in which these lie in the cluster: those that lie alike cost the same.

        Raises like `check_ranks`.
        """
        found: dict[tuple[Any, ...], tuple[int, ...]] = {}
        for ranks in groups:
            split = self.split(ranks)
            found.setdefault((split.size, tuple(level.name for level in split.levels), split.parts), ranks)
        return list(found.values())

    def _split(self, ranks: tuple[int, ...]) -> GroupSplit:
        heads: Sequence[int] = ranks  # one rank of each part
        levels: list[Level] = []
        parts: list[int] = []
        even = True
        for position, level in enumerate(self.levels):
            members: dict[int, list[int]] = {}
            for rank in heads:
                members.setdefault(_domain(level.domains, self._domain_of[position], rank), []).append(rank)
            counts = [len(found) for found in members.values()]
            if max(counts) > 1:
                levels.append(level)
                parts.append(counts[0])
                even = even and min(counts) == max(counts)
            heads = [found[0] for found in members.values()]
        return GroupSplit(len(ranks), tuple(levels), tuple(parts) if even else None)

    def _body(self) -> Mapping[str, Any]:
        return {
            "name": self.name,
            "ranks": self.ranks,
            "device": {**vars(self.device), "flops": dict(self.device.flops)},
            "levels": [_level_body(level) for level in self.levels],
            "notes": dict(self.notes),
        }

    @classmethod
    def _from_body(cls, body: Mapping[str, Any], where: str) -> ClusterSpec:
        check_keys(body, where, ("name", "device", "levels"), ("ranks", "notes"))
        device = _part(Device, body["device"], f"{where}: device")
        if not isinstance(body["levels"], list):
            raise ConfigTypeError(f"{where}: levels is {show(body['levels'])}; give a list of objects")
        levels = tuple(_part(Level, level, f"{where}: levels[{i}]") for i, level in enumerate(body["levels"]))
        return made_of(cls, {**body, "device": device, "levels": levels}, where)


def _checked_levels(levels: object, ranks: int | None) -> tuple[Level, ...]:
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


_SELDOM = ("burst_bytes", "burst_bandwidth", "alpha_busy", "bandwidth_busy")


def _level_body(level: Level) -> dict[str, Any]:
    """A level in a document; what few levels have is left out where it is 0."""
    return {key: value for key, value in vars(level).items() if value or key not in _SELDOM}


def _checked_domains(domains: object, where: str, ranks: int | None) -> int | tuple[tuple[int, ...], ...] | None:
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


def _checked_device(device: object) -> Device:
    if not isinstance(device, Device):
        raise ConfigTypeError(f"device is {show(device)}; give a Device")
    check_text(device.name, "device.name")
    if not isinstance(device.flops, Mapping):
        raise ConfigTypeError(f'device.flops is {show(device.flops)}; give FLOP/s by dtype, such as {{"f32": 1e12}}')
    if not device.flops:
        raise ConfigValueError('device.flops is empty; give FLOP/s by dtype, such as {"f32": 1e12}')
    flops = {
        check_text(dtype, "a key of device.flops"): FLOPS.check(speed, f"device.flops[{show(dtype)}]")
        for dtype, speed in device.flops.items()
    }
    return replace(
        device,
        flops=flops,
        memory_bandwidth=SPEED.check(device.memory_bandwidth, "device.memory_bandwidth"),
        memory_bytes=check_int(device.memory_bytes, "device.memory_bytes", 1, MOST_BYTES),
        op_overhead=SECONDS.check(device.op_overhead, "device.op_overhead"),
        collective_overhead=SECONDS.check(device.collective_overhead, "device.collective_overhead"),
        source=check_text(device.source, "device.source", empty=True),
    )


def _checked_notes(notes: object) -> dict[str, str]:
    if not isinstance(notes, Mapping):
        raise ConfigTypeError(f"notes is {show(notes)}; give a mapping of topics to remarks")
    return {
        check_text(topic, "a key of notes"): check_text(note, f"notes[{show(topic)}]", empty=True)
        for topic, note in notes.items()
    }


def _domain_table(domains: int | tuple[tuple[int, ...], ...] | None) -> tuple[int, ...] | None:
    """The domain of each rank, for domains that are listed."""
    if not isinstance(domains, tuple):
        return None
    return tuple(i for _, i in sorted((rank, i) for i, domain in enumerate(domains) for rank in domain))


def _check_network(levels: Sequence[Level], ranks: int | None, tables: Sequence[tuple[int, ...] | None]) -> None:
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
        pairs = [(_domain(inner, tables[i], rank), _domain(outer, tables[i + 1], rank)) for rank in range(ranks)]
        holder = dict(pairs)
        nested = all(holder[inside] == outside for inside, outside in pairs)
    if not nested:
        raise ConfigValueError(
            f"levels[{i}].domains {show(inner)} do not nest in levels[{i + 1}].domains {show(outer)}; give levels from "
            "the innermost to the outermost, each domain inside one of the next level"
        )


def _domain(domains: int | tuple[tuple[int, ...], ...] | None, table: tuple[int, ...] | None, rank: int) -> int:
    """The number of the domain that holds a rank; `table` as `_domain_table` gives it."""
    if table is not None:
        return table[rank]
    return rank // domains if isinstance(domains, int) else 0


_KEYS: Mapping[type, tuple[tuple[str, ...], tuple[str, ...]]] = {
    Level: (
        ("name", "alpha", "bandwidth"),
        ("domains", "host_seconds_per_byte", *_SELDOM, "source"),
    ),
    Device: (("name", "flops", "memory_bandwidth", "memory_bytes", "op_overhead"), ("collective_overhead", "source")),
}
"""Required and optional keys in a document."""


def _part(made: type[_Spec], value: object, where: str) -> _Spec:
    found = check_object(value, where)
    check_keys(found, where, *_KEYS[made])
    return made(**found)
