"""The modes of commfuse-fx that `step_time` measures, and the clusters they are priced for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

import commfuse_fx as cf
from benchmarks.workloads import LEARNING_RATE, MLP, Workload
from commfuse_fx.measure.calibration import calibrate

OPTIMAL = {kind: {"mode": "optimal", "config": None} for kind in ("allreduce", "allgather", "reducescatter")}

BOTH = ("allgather", "reducescatter")

TP = "tp"


@dataclass(frozen=True)
class Mode:
    """options: of `commfuse_fx.compile`, given a cluster. by_rate: they depend on it, so each rate has a plan.

    is_priced: whether predictions are of what runs, rather than of single ops that are compiled together.
    tries_plans: steps run at the rate, before any is timed, until the plan stays. by_default: whether it is measured
    where no variants are named. marks: how layers are divided. whole_batch: each rank is handed the
    batches of all.
    """

    options: Callable[[Any], Mapping[str, Any]]
    by_rate: bool = True
    is_priced: bool = True
    tries_plans: bool = False
    by_default: bool = True
    marks: Callable[[torch.nn.Module], cf.plans.Plan] | None = None
    whole_batch: bool = False

    def batch(self, workload: Workload, rank: int, ranks: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What one of so many ranks is handed."""
        if not self.whole_batch:
            return workload.batch(rank)
        together = [workload.batch(each) for each in range(ranks)]
        args = tuple(torch.cat(each) for each in zip(*(args for args, _ in together), strict=True))
        return args, {name: torch.cat([kwargs[name] for _, kwargs in together]) for name in together[0][1]}


def tensor_parallel(model: torch.nn.Module) -> cf.plans.Plan:
    """The plan of Megatron-LM: for transformers the ready-made one, with the vocabulary divided."""
    if isinstance(model, MLP):
        columns, rows = ({"weight": (TP, None), "bias": (TP,)}, {"weight": (None, TP)})
        return {
            "blocks.*.up": cf.plans.Layouts(parameters=columns),
            "blocks.*.down": cf.plans.Layouts(parameters=rows),
        }
    return cf.plans.tensor_parallel(model, TP, vocabulary=True)


def small_buckets(level: int) -> dict[str, Any] | None:
    """Of levels 2 and 3, which are there for memory: buckets of 64 MiB would take it again."""
    return {kind: {"mode": "size", "config": 4} for kind in BOTH} if level > 1 else None


MODES = {
    "overlap": Mode(lambda cluster: {}, by_rate=False),
    "inductor": Mode(lambda cluster: {"backend": "inductor"}, by_rate=False, is_priced=False),
    "optimal": Mode(lambda cluster: {"comm_fusion": OPTIMAL, "cluster": cluster}),
    "across steps": Mode(
        lambda cluster: {
            "comm_fusion": OPTIMAL,
            "cluster": cluster,
            "schedule": cf.ScheduleConfig(across_steps=True),
        }
    ),
    "auto": Mode(lambda cluster: {"schedule": "auto"}, tries_plans=True),
    "searched": Mode(
        lambda cluster: {"parallel_mode": "auto", "full_batch": True, "cluster": cluster},
        by_default=False,
        whole_batch=True,
    ),
    "tensor parallel": Mode(
        lambda cluster: {
            "parallel_mode": "semi_auto",
            "mesh": (1, torch.distributed.get_world_size()),
            "full_batch": True,
            "cluster": cluster,
        },
        by_default=False,
        marks=tensor_parallel,
        whole_batch=True,
    ),
    **{
        f"parallel optimizer {level}": Mode(
            lambda cluster, level=level: {
                "enable_parallel_optimizer": True,
                "parallel_optimizer_config": {"level": level, "pad": True},
                "comm_fusion": small_buckets(level),
            },
            by_rate=False,
            by_default=False,
        )
        for level in (1, 2, 3)
    },
    **{
        f"size {mib}": Mode(
            lambda cluster, mib=mib: {"comm_fusion": {"allreduce": {"mode": "size", "config": mib}}},
            by_rate=False,
            by_default=False,
        )
        for mib in (1, 4, 25)
    },
}
"""A mode whose options compile refuses is left out of the table with the reason, like a peer that is not installed."""


class Gauge:
    """Measures the step itself, in the default mode, as a user would before planning by cost. All ranks together.

    Its step's compute is measured again in turn with the variants, so that a prediction and what it is compared with
    are of the same moments of the machine.
    """

    def __init__(self, workload: Workload, rank: int) -> None:
        torch.manual_seed(0)
        model = workload.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self.step = cf.compile(model, loss_fn=workload.loss_fn, optimizer=optimizer)
        self.args, self.kwargs = workload.batch(rank)
        self.step(*self.args, **self.kwargs)

    def calibrated(self, rounds: int = 5) -> cf.StepProfile:
        """The network as it is now, and the step's compute."""
        return self.again(calibrate().cluster, rounds)

    def again(self, cluster: cf.ClusterSpec, rounds: int = 2) -> cf.StepProfile:
        return self.step.profile(*self.args, rounds=rounds, cluster=cluster, **self.kwargs)


def median_profile(profiles: Sequence[cf.StepProfile]) -> cf.StepProfile:
    """Profiles of one step on one cluster, as one: the median of each node's seconds."""
    first = profiles[0]
    seconds = {key: median(each.node_seconds[key] for each in profiles) for key in first.node_seconds}
    return replace(first, node_seconds=seconds)
