"""Ranks of a compiled module begin with the same parameters and buffers, and with rank 0's values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from commfuse_fx.config.fusion_marks import is_of_each_rank
from commfuse_fx.errors import PlanMismatchError
from commfuse_fx.runtime.ranks.agreement import Agreement
from commfuse_fx.runtime.ranks.broadcast import broadcast_parameters
from commfuse_fx.support.logs import logger

log = logger("runtime")


def send_start_values(model: nn.Module, agreement: Agreement, sends: bool, parallel_mode: str) -> None:
    """Compare names, shapes and dtypes of parameters and buffers among the ranks; then rank 0 sends its values.

    sends: whether values are sent at all. Of what is each rank's own by `parallel_mode`, names alone are compared.

    All ranks call this together. If they differ, all of them raise PlanMismatchError, before any value is sent.
    """
    held = [*model.named_parameters(), *model.named_buffers()]
    own = [name for name, tensor in held if is_of_each_rank(tensor, parallel_mode)]
    mine = [f"{name}: {'layerwise_parallel' if name in own else _described(tensor)}" for name, tensor in held]
    listed: list[list[str]] = agreement.from_all(mine)
    for rank, other in enumerate(listed):
        if other != listed[0]:
            raise PlanMismatchError(_difference(listed[0], other, rank))
    shared = [name for name, tensor in held if tensor.is_cpu and tensor.is_shared()]
    if shared:
        log.warning(
            "%s lies in memory that processes share. Where these are ranks, as for a model that is handed to mp.spawn, "
            "each changes what the others compute with: build the model in each rank, or copy.deepcopy it there before "
            "cf.compile",
            shared[0],
        )
    tensors = [tensor.detach() for name, tensor in held if tensor.numel() and name not in own]
    if sends and tensors:
        broadcast_parameters(_apart(tensors))


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _apart(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors without repetitions: tied tensors share their memory, so one copy is enough."""
    found: dict[tuple[int, torch.Size, tuple[int, ...]], torch.Tensor] = {}
    for tensor in tensors:
        found.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), tensor)
    return list(found.values())


def _difference(first: list[str], other: list[str], rank: int) -> str:
    missing = [line for line in first if line not in other]
    added = [line for line in other if line not in first]
    said = [f"rank {rank} has no {line}" for line in missing[:3]] + [f"rank 0 has no {line}" for line in added[:3]]
    what = "\n  ".join(said) or "their order differs"
    return (
        f"ranks 0 and {rank} have different parameters or buffers\n  {what}\nBuild the same model on every rank before "
        "cf.compile."
    )
