"""The modes of commfuse-fx that `step_time` measures, and the cluster they are priced for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

import commfuse_fx as cf
from benchmarks.workloads import Workload
from commfuse_fx.cost.calibrate import calibrate

CALIBRATION_SECONDS = 8.0

OPTIMAL = {kind: {"mode": "optimal", "config": None} for kind in ("allreduce", "allgather", "reducescatter")}

MODES: dict[str, Callable[[Any], Mapping[str, Any]]] = {
    "overlap": lambda cluster: {},
    "optimal": lambda cluster: {"comm_fusion": OPTIMAL, "cluster": cluster},
    "across steps": lambda cluster: {
        "comm_fusion": OPTIMAL,
        "cluster": cluster,
        "schedule": cf.ScheduleConfig(across_steps=True),
    },
}
"""Name -> options of `commfuse_fx.compile`, given the cluster that `prepare` made.

A mode whose options compile refuses is left out of the table with the reason, like a peer that is not installed.
"""


def prepare(rank: int, workload: Workload, rate: float | None) -> Any:
    """What modes get as their cluster: called once on every rank, before anything is built.

    `rate` is in Gbit/s, None without a limit. The network is calibrated as it is, and the step's own compute measured.
    """
    calibration = calibrate(CALIBRATION_SECONDS)
    torch.manual_seed(0)
    model = workload.model()
    step = cf.compile(model, loss_fn=workload.loss_fn, optimizer=torch.optim.AdamW(model.parameters()))
    args, kwargs = workload.batch(rank)
    step(*args, **kwargs)
    return step.profile(*args, rounds=5, cluster=calibration.cluster, **kwargs)


def simulate(step: cf.CompiledStep, args: tuple[Any, ...], kwargs: Mapping[str, Any], cluster: Any) -> Iterable[Any]:
    """Events of the simulated call `step(*args, **kwargs)`, for drawing; none of them where no cluster is known."""
    return () if cluster is None else step.lower(*args, **kwargs).simulate(cluster).events
