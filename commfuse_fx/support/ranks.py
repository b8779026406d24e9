"""Which rank this process is, and of how many."""

from __future__ import annotations

import torch.distributed as dist

from commfuse_fx.support.launchers import launched_rank, launched_ranks


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    """The rank of this process in the world. Before it has joined one: what the launcher says, as torchrun does; 0
    without a launcher."""
    return dist.get_rank() if is_distributed() else launched_rank()


def get_group_size() -> int:
    """The number of processes in the world. Before this one has joined it: what the launcher says, as torchrun does; 1
    without a launcher."""
    return dist.get_world_size() if is_distributed() else launched_ranks()


def joined_rank() -> int:
    """The rank of this process in the world that it has joined; 0 without one."""
    return dist.get_rank() if is_distributed() else 0


def joined_size() -> int:
    """The number of processes in the world that this one has joined; 1 without one."""
    return dist.get_world_size() if is_distributed() else 1
