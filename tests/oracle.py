"""What training must give: one device, or one device per shard with averaged gradients. And how to compare with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import commfuse_fx as cf
from commfuse_fx.virtual.virtual_world import LockstepWorld
from tests import captures
from tests.models import Batch, Case, shards

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]

EXACT = 1e-10

OPTIMAL = {kind: {"mode": "optimal", "config": None} for kind in ("allreduce", "allgather", "reducescatter")}
ACROSS = cf.ScheduleConfig(across_steps=True)


def cluster(name: str, alpha: float, bandwidth: float) -> cf.ClusterSpec:
    """A network of one level (seconds, bytes per second) between slow cores."""
    device = cf.Device(
        name="core", flops={"f64": 1e9, "f32": 2e9}, memory_bandwidth=1e10, memory_bytes=2**34, op_overhead=5e-6
    )
    return cf.ClusterSpec(name=name, device=device, levels=(cf.Level(name="net", alpha=alpha, bandwidth=bandwidth),))


SLOW = cluster("slow", 1e-5, 2e7)
"""Small models have several buckets here, and nearly all their time goes into communication."""
FAST = cluster("fast", 2e-5, 1e10)
"""Here a message costs its latency, and next to nothing else."""

# Options of `make_world`.
ACROSS_STEPS: dict[str, Any] = {"comm_fusion": OPTIMAL, "cluster": SLOW, "schedule": ACROSS}
APART_ACROSS_STEPS: dict[str, Any] = {**ACROSS_STEPS, "comm_fusion": {"openstate": False}}

# One step after another, and communication that runs on into the next step.
PLANS: dict[str, dict[str, Any]] = {"plain": {}, "across": ACROSS_STEPS, "apart-across": APART_ACROSS_STEPS}
each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    # Not Adam for models in general: it turns rounding noise in gradients that are zero in theory into whole steps.
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)


def by_class(cls: Any, **settings: Any) -> MakeOptimizer:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = cls(model.parameters(), **settings)
        return optimizer

    return make


class Own(torch.optim.SGD):
    """An optimizer that the compiler has no rule for: its own step() is called."""


def eager_loss(case: Case, model: nn.Module, batch: Batch) -> torch.Tensor:
    if case.loss_fn is not None:
        return case.loss_fn(model(*batch[:-1]), batch[-1])
    output = model(*batch)
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss


def eager_gradients(case: Case, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Of one call, without touching `.grad`."""
    model = shadow(model)
    eager_loss(case, model, batch).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def shadow(model: nn.Module) -> nn.Module:
    """The same parameters and buffers in a module of its own, without gradients."""
    held = [(param, param.grad) for param in model.parameters()]
    for param, _ in held:
        param.grad = None
    made = copy.deepcopy(model)
    for param, grad in held:
        param.grad = grad
    return made


def train_reference(
    case: Case,
    model: nn.Module,
    batches: Sequence[Batch],
    world: int,
    make_optimizer: MakeOptimizer | None = None,
    make_scheduler: MakeScheduler | None = None,
    max_norm: float | None = None,
    micro_batches: int = 1,
) -> list[nn.Module]:
    """Train copies of `model` eagerly; returns one per rank. Without an optimizer gradients pile up in `.grad`.

    max_norm: what the gradients that the optimizer takes are clipped to. micro_batches: how many batches are one step.
    """
    makers = make_optimizer, make_scheduler, max_norm, micro_batches
    if not case.coupled:
        return _train([copy.deepcopy(model)], case, [[batch] for batch in batches], *makers) * world
    replicas = [copy.deepcopy(model) for _ in range(world)]
    return _train(replicas, case, [shards(batch, world) for batch in batches], *makers)


def _train(
    replicas: list[nn.Module],
    case: Case,
    steps: Sequence[Sequence[Batch]],
    make_optimizer: MakeOptimizer | None,
    make_scheduler: MakeScheduler | None,
    max_norm: float | None,
    micro_batches: int,
) -> list[nn.Module]:
    optimizers = [make_optimizer(replica) for replica in replicas] if make_optimizer else []
    schedulers = [make_scheduler(optimizer) for optimizer in optimizers] if make_scheduler else []
    for begin in range(0, len(steps), micro_batches):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for parts in steps[begin : begin + micro_batches]:
            for replica, part in zip(replicas, parts, strict=True):
                loss = eager_loss(case, replica, part)
                (loss / micro_batches if micro_batches > 1 else loss).backward()
        if len(replicas) > 1:
            for params in zip(*(replica.parameters() for replica in replicas), strict=True):
                if params[0].grad is not None:
                    mean = torch.stack([param.grad for param in params]).mean(0)
                    for param in params:
                        param.grad = mean.clone()
        for optimizer in optimizers if max_norm is not None else ():
            clip(optimizer, max_norm)
        for thing in (*optimizers, *schedulers):
            thing.step()
    return replicas


def clip(optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
    """Clip the gradients that the optimizer takes. Returns their norm."""
    return torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm)


def make_world(
    case: Case,
    model: nn.Module,
    world: int,
    make_optimizer: MakeOptimizer | None = None,
    comm_fusion: Any = None,
    **options: Any,
) -> LockstepWorld:
    captures.share(model, case)
    optimizer = make_optimizer(model) if make_optimizer else None
    options = {"device_num": world, "global_rank": 0, "loss_fn": case.loss_fn, **options}
    return LockstepWorld(cf.compile(model, comm_fusion, optimizer=optimizer, **options, form="step"))


def train_world(
    world: LockstepWorld, batches: Sequence[Batch], make_scheduler: MakeScheduler | None = None, **run: Any
) -> list[nn.Module]:
    """Train on shards of global batches; returns the ranks' models."""
    schedulers = [make_scheduler(optimizer) for optimizer in world.optimizers] if make_scheduler else []
    for batch in batches:
        world(shards(batch, len(world.models)), **run)
        for scheduler in schedulers:
            scheduler.step()
    return world.models


def assert_same(
    have: Sequence[nn.Module], want: Sequence[nn.Module], tolerance: float = EXACT, gradients: bool = False
) -> None:
    """Parameters and buffers (or gradients) of every rank."""
    for rank, (mine, other) in enumerate(zip(have, want, strict=True)):
        assert_same_tensors(tensors_of(mine, gradients), tensors_of(other, gradients), tolerance, f"rank {rank}: ")


def tensors_of(model: nn.Module, gradients: bool = False) -> dict[str, torch.Tensor]:
    if gradients:
        return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_same_tensors(
    have: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float, where: str = ""
) -> None:
    """`tolerance` is relative and absolute; 0 asks for the same bits."""
    assert have.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(
            have[name], want[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{where}{name}: {text}"
        )


def collectives(world: LockstepWorld, batch: Batch) -> list[cf.Collective]:
    return world.step.lower(*shards(batch, len(world.models))[0]).collectives
