"""The modes of commfuse-fx that `step_time` measures, and the cluster they are priced for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import commfuse_fx as cf
from benchmarks.workloads import Workload

MODES: dict[str, Callable[[Any], Mapping[str, Any]]] = {
    "overlap": lambda cluster: {},
}
"""Name -> options of `commfuse_fx.compile`, given the cluster that `prepare` made.

A mode whose options compile refuses is left out of the table with the reason, like a peer that is not installed.
"""


def prepare(rank: int, workload: Workload, rate: float | None) -> Any:
    """What modes get as their cluster: called once on every rank, before anything is built.

    `rate` is in Gbit/s, None without a limit. All ranks must return equal clusters. None: no cluster is known.
    """
    return None


def simulate(step: cf.CompiledStep, args: tuple[Any, ...], kwargs: Mapping[str, Any], cluster: Any) -> Iterable[Any]:
    """Events of the simulated call `step(*args, **kwargs)`, for drawing; none of them where no cluster is known."""
    return () if cluster is None else step.lower(*args, **kwargs).simulate(cluster).events
