"""Copies of tensors that share memory with each other where the tensors themselves do."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from commfuse_fx.ir.ops.shared_memory import extent_of

_ALIGNED = 64


def copied(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Copies with the same strides, by the `id` of the tensor. A kernel finds them aligned as the tensors are."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return _copied({id(each): each.detach() for each in tensors})


def _copied(tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    found = {key: each.clone() for key, each in tensors.items() if not _has_memory(each)}
    placed = sorted((str(each.device), each.data_ptr(), key) for key, each in tensors.items() if key not in found)
    block: list[int] = []
    end: tuple[str, int] = ("", 0)
    for device, begin, key in placed:
        if (device, begin) >= end or device != end[0]:
            found.update(_block(block, tensors))
            block, end = [], (device, 0)
        block.append(key)
        end = device, max(end[1], begin + extent_of(tensors[key]))
    found.update(_block(block, tensors))
    return found


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and bool(tensor.numel()) and not (tensor.is_conj() or tensor.is_neg())


def _block(keys: list[int], tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Copies of tensors whose ranges of memory meet."""
    if not keys:
        return {}
    first = tensors[keys[0]]
    low = first.data_ptr() - first.data_ptr() % _ALIGNED
    high = max(tensors[key].data_ptr() + extent_of(tensors[key]) for key in keys)
    memory = torch.empty(high - low, dtype=torch.uint8, device=first.device).untyped_storage()
    found: dict[int, torch.Tensor] = {}
    for key in keys:
        tensor = tensors[key]
        count, begin = extent_of(tensor) // tensor.element_size(), (tensor.data_ptr() - low) // tensor.element_size()
        place = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        place.set_(memory, begin, (count,), (1,))
        place.copy_(tensor.as_strided((count,), (1,)))
        found[key] = place.as_strided(tensor.shape, tensor.stride())
    return found
