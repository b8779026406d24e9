"""Which of a model's tensors have elements in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import gcd

import torch

_MOST = 2**15 - 1  # tensors that one mask tells apart


def is_part_of_storage(tensor: torch.Tensor) -> bool:
    """Whether its storage holds more than it does, as that of a view does: others may look at the same memory."""
    return tensor.layout == torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes


def overlaps(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, ...]]:
    """For each tensor that shares elements with others, directly or through others, the names of these.

    Tensors whose elements only lie between each other's, as the parts of a tensor that was divided by columns do, share
    none. Tensors without elements or without memory are left out.
    """
    found: dict[str, tuple[str, ...]] = {}
    for cluster in _clusters(tensors):
        for names in _sharing(cluster):
            found.update({name: tuple(other for other in names if other != name) for name in names})
    return {name: found[name] for name in tensors if name in found}


Placed = tuple[int, int, str, torch.Tensor]  # first byte, the byte behind the last one, name


def _clusters(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[Placed]]:
    """Those whose ranges of memory meet."""
    placed = sorted(
        ((tensor.data_ptr(), tensor.data_ptr() + extent_of(tensor), name, tensor) for name, tensor in tensors.items()
         if tensor.layout == torch.strided and tensor.numel() and tensor.data_ptr()),
        key=lambda each: each[:3],
    )  # fmt: skip
    cluster: list[Placed] = []
    end = 0
    for each in placed:
        if each[0] >= end:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(each)
        end = max(end, each[1])
    if len(cluster) > 1:
        yield cluster


def extent_of(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to behind the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * tensor.element_size()


def _sharing(cluster: Sequence[Placed]) -> list[list[str]]:
    """The names of those that share elements: a mask of their memory tells who has marked it before."""
    if len(cluster) > _MOST:
        return [[name for _, _, name, _ in cluster]]
    low, high = cluster[0][0], max(end for _, end, _, _ in cluster)
    unit = gcd(*(begin - low for begin, _, _, _ in cluster), *(tensor.element_size() for *_, tensor in cluster))
    mask = torch.zeros((high - low) // unit, dtype=torch.int16)
    group = list(range(len(cluster) + 1))
    for number, (begin, _, _, tensor) in enumerate(cluster, 1):
        width = tensor.element_size() // unit
        stride = (*(step * width for step in tensor.stride()), 1)
        place = mask.as_strided((*tensor.shape, width), stride, (begin - low) // unit)
        met = {group[int(other)] for other in place.unique() if other}
        group = [number if each in met else each for each in group]
        place.fill_(number)
    names: dict[int, list[str]] = {}
    for number, (_, _, name, _) in enumerate(cluster, 1):
        names.setdefault(group[number], []).append(name)
    return [each for each in names.values() if len(each) > 1]
