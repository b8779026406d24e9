"""parameter_broadcast: start every rank from rank 0's parameters.

Why: docs/decisions.md, "BatchNorm statistics stay on their rank, unless you ask".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

BUCKET_BYTES = 64 * 2**20
"""The most bytes of a flat buffer. Larger messages are hardly faster, and the buffer is extra memory."""


def broadcast_parameters(tensors: Sequence[torch.Tensor], source: int = 0) -> None:
    """Send the values of rank `source` to all ranks, in flat buffers of at most 64 MiB per dtype and device.

    All ranks call this together, with tensors of the same shapes and dtypes in the same order.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in alike.values():
        for bucket in buckets(group):
            _send(bucket, source)


def buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of neighbouring tensors on one device, of at most BUCKET_BYTES; a larger tensor is a bucket of its own."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > BUCKET_BYTES or tensor.device != bucket[0].device):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def _send(tensors: list[torch.Tensor], source: int) -> None:
    with torch.no_grad():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(flat, source)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))
