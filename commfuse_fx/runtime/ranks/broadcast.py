"""parameter_broadcast: start every rank from rank 0's parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

BUCKET_BYTES = 64 * 2**20


def broadcast_parameters(tensors: Sequence[torch.Tensor], source: int = 0) -> None:
    """Send the values of one rank to all ranks, in flat buffers of at most 64 MiB per dtype and device."""
    buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        bucket = buckets.setdefault(key, [])
        if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > BUCKET_BYTES:
            _send(bucket, source)
            bucket = buckets[key] = []
        bucket.append(tensor)
    for bucket in buckets.values():
        _send(bucket, source)


def _send(tensors: list[torch.Tensor], source: int) -> None:
    with torch.no_grad():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(flat, source)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))
