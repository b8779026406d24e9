"""A compiled module keeps for its backward what eager autograd keeps, and frees it as the backward uses it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import commfuse_fx as cf


class Living(TorchDispatchMode):
    """Counts the activations of the forward that are alive, at each op of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, StorageWeakRef] = {}
        self.in_backward = False
        self.alive: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.in_backward:
            self.alive.append(sum(not each.expired() for each in self.made.values()))
        elif isinstance(out, torch.Tensor) and out.shape == (32, 8):
            held = StorageWeakRef(out.untyped_storage())
            self.made[held.cdata] = held
        return out


def alive(call: Any) -> list[int]:
    x = torch.ones(32, 8)
    for _ in range(2):
        counted = Living()
        with counted:
            loss = call(x).sum()
            counted.in_backward = True
            loss.backward()
    return list(dict.fromkeys(counted.alive))


class Checkpointed(nn.Sequential):
    """Computes each half again in the backward."""

    def half(self, first: int) -> nn.Module:
        return nn.Sequential(*(self[number] for number in range(first, first + 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in range(0, len(self), 4):
            x = checkpoint(self.half(first), x, use_reentrant=False)
        return x


def test_what_the_backward_has_used_is_freed() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    for model, kept in ((nn.Sequential(*layers), [4, 3, 2, 1, 0]), (Checkpointed(*layers), [1, 0])):
        assert alive(copy.deepcopy(model)) == kept
        assert alive(cf.compile(model, cpu_kernels=False)) == kept
