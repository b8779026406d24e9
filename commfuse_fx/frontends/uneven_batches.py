"""Modules whose ranks have different numbers of batches: `torch.distributed.algorithms.Join`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from commfuse_fx.frontends.module_session import ModuleSession
from commfuse_fx.runtime.ranks.broadcast import broadcast_parameters


class ModuleJoinHook(JoinHook):
    """What a rank that has no more batches does for the others."""

    def __init__(self, session: ModuleSession) -> None:
        self._session = session

    def main_hook(self) -> None:
        """Answer one forward and backward of the other ranks."""
        self._session.answer()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks end with the parameters and buffers of one of those that had the most batches."""
        model = self._session.planner.model
        found = torch.tensor([dist.get_rank() if is_last_joiner else -1], device=self._session.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        held = [*model.parameters(), *model.buffers()]
        broadcast_parameters([tensor.detach() for tensor in held if tensor.numel()], int(found))
