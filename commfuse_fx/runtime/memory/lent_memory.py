"""The memory of a bucket whose parts the user gets as gradients, used again once nobody holds them.

Why: docs/decisions.md, "Gradient memory is kept between steps".
"""

from __future__ import annotations

import sys

import torch

from commfuse_fx.ir.core.meta import TensorSpec
from commfuse_fx.runtime.memory.own_storage import OWN_USERS, with_own_storage


class LentMemory:
    """Lent memory is one flat tensor, and the parts of it that have been given away, each with a storage of its own.

    It is free again when the user has dropped all tensors that see the parts. The storages count them. Like the
    buckets of DistributedDataParallel, it does not look at streams that read gradients beside the one of the backward.
    """

    def __init__(self, spec: TensorSpec) -> None:
        self.memory = spec.empty()
        self._stream = _stream(self.memory)
        self._parts: dict[tuple[TensorSpec, int], torch.Tensor] = {}
        self._storages: list[torch.UntypedStorage] = []
        self._handles: list[int] = []
        self._references: list[int] = []
        self._addresses: list[int] = []

    def part(self, spec: TensorSpec, offset: int) -> torch.Tensor:
        """The part at `offset` (elements) with this shape and these strides. Give the user a new tensor of it
        (`detach`), as users change attributes of theirs."""
        key = (spec, offset)
        if key not in self._parts:
            part = with_own_storage(self.memory.as_strided(spec.shape, spec.stride, offset))
            self._parts[key] = part
            self._storages.append(part.untyped_storage())
            self._handles.append(self._storages[-1]._cdata)
            self._references.append(next(map(sys.getrefcount, self._storages[-1:])) - 1)  # without that of the slice
            self._addresses.append(part.data_ptr())
        return self._parts[key]

    def is_free(self) -> bool:
        """Whether nobody else sees a part, and all lie where they did: `share_memory_()`, for one, moves them."""
        if any(count != OWN_USERS for count in map(torch._C._storage_Use_Count, self._handles)):
            return False
        if list(map(sys.getrefcount, self._storages)) != self._references:
            return False
        moved = list(map(torch.Tensor.data_ptr, self._parts.values())) != self._addresses
        return not moved and _stream(self.memory) == self._stream


def _stream(tensor: torch.Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0
