"""The machine that a step is priced for: devices, and the levels of the network between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from commfuse_fx.errors import ConfigTypeError, ConfigValueError
from commfuse_fx.machine.bounds import FLOPS, MOST_BYTES, MOST_RANKS, SECONDS, SPEED
from commfuse_fx.machine.check_levels import check_network, checked_levels, domain_of, domain_table
from commfuse_fx.machine.cluster_parts import Device, Level, level_body, part_of
from commfuse_fx.support.checks import check_int, check_text, is_int, show
from commfuse_fx.support.documents import Document, check_keys, made_of


@dataclass(frozen=True, slots=True)
class GroupSplit:
    """A split says how a group of ranks lies in a cluster.

    size: the number of ranks in the group.
    levels: the levels that messages between its ranks use, from the innermost on.
    parts: for each of these levels, how many parts it joins, each part being what the levels inside it have
        joined. Their product is `size`. None when the parts are not the same everywhere (5 ranks of one host, 3 of
        another).
    memo: room for what is derived from the split, so that it is derived once.
    """

    size: int
    levels: tuple[Level, ...]
    parts: tuple[int, ...] | None
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class ClusterSpec(Document, kind="cluster"):
    """A cluster of equal devices, joined by the levels of a network.

    name: of the cluster.
    device: what each rank computes with.
    levels: the network, from the innermost level to the outermost.
    ranks: how many there are. None: as many as the step has (a preset of one host per rank, say).
    notes: free remarks, by topic.

    Numbers come out as floats, lists as tuples. Raises ConfigTypeError or ConfigValueError, which name the
    field, for figures that no machine has, such as a bandwidth of 0. They are raised too for levels that do not
    form a network: each level has every rank once, each domain lies inside one domain of the next level, and
    the last level joins all ranks.
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
        levels = checked_levels(self.levels, self.ranks)
        object.__setattr__(self, "levels", levels)
        object.__setattr__(self, "device", _checked_device(self.device))
        object.__setattr__(self, "notes", _checked_notes(self.notes))
        object.__setattr__(self, "_domain_of", tuple(domain_table(level.domains) for level in levels))
        check_network(levels, self.ranks, self._domain_of)

    def check_ranks(self, ranks: Sequence[int]) -> None:
        """Check that a group can be one of this cluster.

        Raises ConfigTypeError for a rank that is no int, and ConfigValueError for a group that is empty, has a
        rank twice, or has ranks that the cluster does not have.
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
        """The levels that a group spans, computed once per group.

        Two ranks talk over the innermost level that has both in one domain. So a group with one rank of each
        host only spans the network between the hosts, and one that lies in one host only the links inside it.
        Raises like `check_ranks`.
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
        """One group of each way in which these lie in the cluster; groups that lie alike cost the same.

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
                members.setdefault(domain_of(level.domains, self._domain_of[position], rank), []).append(rank)
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
            "levels": [level_body(level) for level in self.levels],
            "notes": dict(self.notes),
        }

    @classmethod
    def _from_body(cls, body: Mapping[str, Any], where: str) -> ClusterSpec:
        check_keys(body, where, ("name", "device", "levels"), ("ranks", "notes"))
        device = part_of(Device, body["device"], f"{where}: device")
        if not isinstance(body["levels"], list):
            raise ConfigTypeError(f"{where}: levels is {show(body['levels'])}; give a list of objects")
        levels = tuple(part_of(Level, level, f"{where}: levels[{i}]") for i, level in enumerate(body["levels"]))
        return made_of(cls, {**body, "device": device, "levels": levels}, where)


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
