"""Which rank this process is, and of how many."""

from __future__ import annotations

import torch.distributed as dist


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    """The rank of this process in the world; 0 without torch.distributed."""
    return dist.get_rank() if is_distributed() else 0


def get_group_size() -> int:
    """The number of processes in the world; 1 without torch.distributed."""
    return dist.get_world_size() if is_distributed() else 1
