"""What `torch.distributed.algorithms.Join` does with a compiled module."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from commfuse_fx.calls.module_session import ModuleSession
from commfuse_fx.config.fusion_marks import is_of_each_rank
from commfuse_fx.gradients.uneven_batches import is_known, note_known
from commfuse_fx.runtime.ranks.broadcast import broadcast_parameters


class ModuleJoin(Join):
    """The context of one compiled module. Ranks that wait for this one hear of what happens inside of it."""

    def __init__(self, module: Joinable, session: ModuleSession, enable: bool, throws: bool, of_all: bool) -> None:
        super().__init__([module], enable, throws, divide_by_initial_world_size=of_all)
        self._module = module
        self._session = session

    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        uneven = self._session.uneven
        if self._enable and uneven is not None:
            if value is None:
                uneven.end()
            elif isinstance(value, Exception) and not is_known(value):
                with suppress(RuntimeError):  # nobody is left to be told
                    self._tell(value)
        super().__exit__(type, value, traceback)

    def _tell(self, error: Exception) -> None:
        """Other ranks wait for this one's vote, or for its next forward."""
        uneven = self._session.uneven
        assert uneven is not None, "several ranks"
        if uneven.owes:
            self._session.tell(error)
        else:
            Join.notify_join_context(self._module)
            uneven.fail(error)
            note_known(error)


class ModuleJoinHook(JoinHook):
    """What a rank that has no more batches does for the others."""

    def __init__(self, module: Joinable, session: ModuleSession, **options: Any) -> None:
        self._module = module
        self._session = session
        if session.uneven is not None:
            session.uneven.enter(mean_of_active=not options.get("divide_by_initial_world_size", True))

    def main_hook(self) -> None:
        """Answer one forward and backward of the other ranks."""
        if self._session.uneven is not None:
            self._session.uneven.attend(self._session.runners.groups)

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks end with the parameters and buffers of one of those that had the most batches."""
        model = self._session.planner.model
        found = torch.tensor([dist.get_rank() if is_last_joiner else -1], device=self._session.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        mode = self._session.planner.config.parallel_mode
        held = [each for each in (*model.parameters(), *model.buffers()) if not is_of_each_rank(each, mode)]
        broadcast_parameters([tensor.detach() for tensor in held if tensor.numel()], int(found))
        # What runs behind the context is not in it; `Join` itself never says so.
        self._module._join_config = self._module._join_config.construct_disabled_join_config()
        if self._session.uneven is not None:
            self._session.uneven.leave()
