"""Python objects that ranks send to each other, and the bytes of tensors, without numpy.

torch's own `all_gather_object`, `broadcast_object_list` and `Tensor.numpy` need numpy, which torch does not depend on.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def memory_of(values: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, where they lie: the tensor has to stay alive."""
    if not values.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * values.nbytes).from_address(values.data_ptr())).cast("B")


def exchange_objects(
    mine: Any, gather: Callable[[torch.Tensor], Sequence[torch.Tensor]], device: str = "cpu"
) -> list[Any]:
    """What each rank has, by rank.

    gather: returns the tensors of all ranks, which have one shape, given this rank's. device: where it takes tensors.
    """
    payload = pickle.dumps(mine)
    sizes = [int(size) for size in gather(torch.tensor([len(payload)], device=device))]
    given = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    memory_of(given)[: len(payload)] = payload
    rows = [row.cpu() for row in gather(given.to(device))]
    return [pickle.loads(memory_of(row)[:size]) for row, size in zip(rows, sizes, strict=True)]


def gather_objects(mine: Any) -> list[Any]:
    """What each rank of the world has, by rank. All ranks call it together."""

    def gather(given: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(given) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, given)
        return rows

    kinds = [device.type for device in dist.distributed_c10d._get_default_group()._device_types]
    return exchange_objects(mine, gather, "cpu" if "cpu" in kinds or not kinds else kinds[0])
