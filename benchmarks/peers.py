"""One training step each, the way PyTorch programs write it: what this project's steps are compared with. The module
form of this project takes DistributedDataParallel's place in such a program.

All of them use AdamW(fused=True) and set gradients to None before each backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commfuse_fx as cf
from benchmarks.modes import small_buckets
from benchmarks.workloads import LEARNING_RATE, Workload, eager_loss

Step = Callable[[], Any]


def unfused(workload: Workload, model: nn.Module) -> Step:
    """No overlap and no fusion: one all_reduce per gradient once the backward pass is over."""
    size = dist.get_world_size()

    def average() -> None:
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad.div_(size)

    return _step(workload, model, average)


def ddp(workload: Workload, model: nn.Module) -> Step:
    return _step(workload, DistributedDataParallel(model))


def compiled_ddp(workload: Workload, model: nn.Module) -> Step:
    return _step(workload, DistributedDataParallel(torch.compile(model)))


def fsdp2(workload: Workload, model: nn.Module) -> Step:
    """`fully_shard` on each of the workload's blocks, then on the root, over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in workload.blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _step(workload, model)


def zero_with_ddp(workload: Workload, model: nn.Module) -> Step:
    """DistributedDataParallel with ZeroRedundancyOptimizer, which divides the optimizer's state."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=torch.optim.AdamW, lr=LEARNING_RATE, fused=True
    )
    return _step(workload, wrapped, optimizer=optimizer)


def module(workload: Workload, model: nn.Module) -> Step:
    return _step(workload, cf.compile(model))


def compiled_module(workload: Workload, model: nn.Module) -> Step:
    return _step(workload, cf.compile(model, backend="inductor"))


def divided_module(level: int) -> Callable[[Workload, nn.Module], Step]:
    """The module form with `ShardedOptimizer`. Its buckets are those of the compiled step of the same level."""

    def build(workload: Workload, model: nn.Module) -> Step:
        config = {"level": level, "pad": True}
        options = {"enable_parallel_optimizer": True, "parallel_optimizer_config": config} if level > 1 else {}
        wrapped = cf.compile(model, comm_fusion=small_buckets(level), **options)
        given = {"parallel_optimizer_config": config} if level == 1 else {}
        optimizer = cf.ShardedOptimizer(wrapped, torch.optim.AdamW, lr=LEARNING_RATE, fused=True, **given)
        return _step(workload, wrapped, optimizer=optimizer)

    return build


DIVIDED = {f"module form {level}": divided_module(level) for level in (1, 2, 3)}
"""Measured where they are named."""

PEERS: dict[str, Callable[[Workload, nn.Module], Step]] = {
    "unfused after backward": unfused,
    "DDP": ddp,
    "DDP + torch.compile": compiled_ddp,
    "FSDP2": fsdp2,
    "ZeRO + DDP": zero_with_ddp,
    "module form": module,
    **DIVIDED,
}


def _step(
    workload: Workload,
    model: nn.Module,
    after_backward: Callable[[], None] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Step:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    args, kwargs = workload.batch(dist.get_rank())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        eager_loss(workload, model, args, kwargs).backward()
        if after_backward is not None:
            after_backward()
        optimizer.step()

    return step
