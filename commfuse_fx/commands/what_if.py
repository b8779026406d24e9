"""What a step is planned for besides what was asked: other bandwidths, less memory, other numbers of devices.

Why: docs/decisions.md, "What-ifs with other numbers of devices keep the global batch".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from commfuse_fx.config.compile_config import CompileConfig, ScheduleConfig
from commfuse_fx.cost.numbers import in_bytes
from commfuse_fx.errors import ConfigValueError
from commfuse_fx.machine.cluster import ClusterSpec
from commfuse_fx.machine.source import Costs, cluster_of

_UNITS = {"B": 1, **{f"{letter}B": 1000 ** (i + 1) for i, letter in enumerate("KMGT")}}
_UNITS |= {f"{letter}iB": 1024 ** (i + 1) for i, letter in enumerate("KMGT")}


@dataclass(frozen=True)
class Case:
    """A case is what a step is planned for.

    devices: the number of ranks.
    bandwidth: what the bandwidths of all levels of the network are multiplied with.
    memory: bytes that a rank may need at most; None: any.
    """

    devices: int
    bandwidth: float = 1.0
    memory: int | None = None

    def config(self, asked: CompileConfig) -> CompileConfig:
        """The configuration of this case, from that without what-ifs, which has a cluster.

        Raises ConfigValueError for a bandwidth that no network has.
        """
        try:
            found = replace(asked, cluster=_faster(asked.cluster, self.bandwidth))
        except ConfigValueError as error:
            raise ConfigValueError(f"--bandwidth x{self.bandwidth:g}: {error}") from None
        if self.memory is None:
            return found
        schedule = asked.schedule if isinstance(asked.schedule, ScheduleConfig) else ScheduleConfig()
        return replace(found, schedule=replace(schedule, memory_limit=self.memory))

    def __str__(self) -> str:
        bandwidth = f", bandwidth x{self.bandwidth:g}" if self.bandwidth != 1.0 else ""
        memory = f", at most {in_bytes(self.memory)} per rank" if self.memory is not None else ""
        devices = "1 device" if self.devices == 1 else f"{self.devices} devices"
        return f"{devices}{bandwidth}{memory}"


def cases(devices: Sequence[str], bandwidths: Sequence[str], memories: Sequence[str], default: int) -> list[Case]:
    """What the options ask for, each of which may be given several times or with commas: every number of devices as it
    is, and then with each combination of what-ifs. Raises ConfigValueError."""
    counts = list(dict.fromkeys(map(_devices, _parts(devices, "--devices")))) or [default]
    factors = list(dict.fromkeys(map(_factor, _parts(bandwidths, "--bandwidth")))) or [1.0]
    limits: list[int | None] = [*dict.fromkeys(map(_bytes, _parts(memories, "--memory")))] or [None]
    asked = (Case(*each) for each in product(counts, factors, limits))
    plain = [Case(count) for count in counts]
    return list(dict.fromkeys(sorted((*plain, *asked), key=lambda case: counts.index(case.devices))))


def _parts(given: Sequence[str], option: str) -> list[str]:
    found = [part.strip() for text in given for part in text.split(",")]
    if "" in found:
        raise ConfigValueError(f"{option} {','.join(given)!r}: a value between the commas is missing")
    return found


def _devices(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ConfigValueError(f"--devices {text!r}: give numbers of devices, such as 64 or 64,128")
    return int(text)


def _factor(text: str) -> float:
    match = re.fullmatch(r"x(\d+(?:\.\d*)?(?:e[+-]?\d+)?)", text)
    factor = float(match[1]) if match else 0.0
    if not 0.0 < factor < inf:
        raise ConfigValueError(f"--bandwidth {text!r}: give factors above 0, such as x2 or x0.5,x4")
    return factor


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d*)?) ?([KMGT]?i?B)", text)
    found = int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if not 1 <= found < 1 << 60:
        raise ConfigValueError(
            f"--memory {text!r}: give bytes per rank, above 0 and with a unit, such as 40GiB or 80GB"
        )
    return found


def _faster(costs: Costs, factor: float) -> Costs:
    if factor == 1.0:
        return costs
    cluster = cluster_of(costs)
    levels = (
        replace(
            level,
            bandwidth=level.bandwidth * factor,
            bandwidth_busy=level.bandwidth_busy * factor,
            burst_bandwidth=level.burst_bandwidth * factor,
        )
        for level in cluster.levels
    )
    faster = replace(cluster, levels=tuple(levels))
    return faster if isinstance(costs, ClusterSpec) else replace(costs, cluster=faster)
