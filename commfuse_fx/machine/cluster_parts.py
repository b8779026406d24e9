"""What a cluster consists of: its devices, and the levels of the network between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from commfuse_fx.support.documents import check_keys
from commfuse_fx.support.strict_json import check_object

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

    name: of the device.
    flops: FLOP per second that large matrix products reach, by dtype name ("f64", "f32", "bf16", "f16", ...).
    memory_bandwidth: bytes per second.
    memory_bytes: capacity in bytes.
    op_overhead: seconds that any op takes at least.
    collective_overhead: seconds of compute that each message costs besides its bytes: to hand it over, to wake
        the backend's threads on the core that computes, and to wait for it.
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


_SELDOM = ("burst_bytes", "burst_bandwidth", "alpha_busy", "bandwidth_busy")


_KEYS: Mapping[type, tuple[tuple[str, ...], tuple[str, ...]]] = {
    Level: (
        ("name", "alpha", "bandwidth"),
        ("domains", "host_seconds_per_byte", *_SELDOM, "source"),
    ),
    Device: (("name", "flops", "memory_bandwidth", "memory_bytes", "op_overhead"), ("collective_overhead", "source")),
}
"""Required and optional keys in a document."""


def level_body(level: Level) -> dict[str, Any]:
    """A level in a document; what few levels have is left out where it is 0."""
    return {key: value for key, value in vars(level).items() if value or key not in _SELDOM}


def part_of(made: type[_Spec], value: object, where: str) -> _Spec:
    found = check_object(value, where)
    check_keys(found, where, *_KEYS[made])
    return made(**found)
