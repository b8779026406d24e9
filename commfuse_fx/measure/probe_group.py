"""A group of ranks on which something is measured, by all of them together."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from commfuse_fx.measure.probe import synchronize

Heed = Callable[[Any], Any]
"""Wraps the work of a Gloo collective, as `Distress.heed` does."""


class Group:
    """Ranks that measure together: their collectives, their clock, and the numbers they agree on.

    heed: lets a wait end when another rank has left; None: it ends when the backend says so.
    """

    def __init__(self, handle: Any, ranks: tuple[int, ...], device: torch.device, heed: Heed | None = None) -> None:
        self.handle = handle
        self.ranks = ranks
        self.size = len(ranks)
        self.device = device
        self._heed: Heed = heed if heed is not None and device.type == "cpu" else lambda work: work

    def timed(self, call: Callable[[], Any]) -> float:
        synchronize(self.device)
        start = perf_counter()
        call()
        synchronize(self.device)
        return perf_counter() - start

    def agreed(self, seconds: float) -> float:
        """The largest of the ranks' values: what follows from it is the same on all of them."""
        value = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        self._heed(dist.all_reduce(value, dist.ReduceOp.MAX, self.handle, async_op=True)).wait()
        return float(value)

    def all_reduce(self, x: torch.Tensor) -> Any:
        return self._heed(dist.all_reduce(x, group=self.handle, async_op=True))

    def collective(self, kind: str, nbytes: int) -> tuple[int, int, Callable[[], Any]]:
        """(bytes of the payload, collectives in one call, the call)."""
        count = max(nbytes // 4 // self.size, 1) * self.size
        x = torch.zeros(count, device=self.device)
        if kind == "all_reduce":
            return count * 4, 1, lambda: self.all_reduce(x).wait()
        if kind == "all_gather":
            part = torch.zeros(count // self.size, device=self.device)
            return count * 4, 1, lambda: self._heed(_all_gather(x, part, group=self.handle, async_op=True)).wait()

        def broadcasts() -> None:
            # Each rank is the root once: a root alone would run ahead of those that it sends to.
            for root in self.ranks:
                self._heed(dist.broadcast(x, root, self.handle, async_op=True)).wait()

        return count * 4, self.size, broadcasts


# Its old name warns from torch 2.13 on.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
