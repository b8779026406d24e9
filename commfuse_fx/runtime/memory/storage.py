"""Where the parameters and the optimizer state of a compiled step live.

Parameters that are updated together become parts of one flat tensor, and so do their optimizer states. Each part has
a storage of its own over its bytes of the flat memory, so that a file or a copy of it holds nothing else.
To the user nothing changes: `param`, `optimizer.state[param]` and both state_dicts stay what they were,
and values that the user loads or assigns are taken over at the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from commfuse_fx.ir.program import Program, Source
from commfuse_fx.ir.shared_memory import is_part_of_storage, overlaps
from commfuse_fx.ir.update_layout import LayoutConflict
from commfuse_fx.runtime.memory.bound_update import BoundUpdate, Optimizer
from commfuse_fx.runtime.memory.flat_pool import FlatPool


class Storage:
    """Binds the inputs of one program that belong to its parameters and its optimizer."""

    def __init__(
        self,
        program: Program,
        params: Mapping[str, nn.Parameter],
        optimizer: Optimizer | None,
        pool: FlatPool | None = None,
        buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.program = program
        self.params = params
        self.buffers = buffers or {}
        self.pool = FlatPool() if pool is None else pool
        self._updates: list[BoundUpdate] = []
        for update in program.updates:
            assert optimizer is not None, "a program that updates has the optimizer's state as its input"
            self._updates.append(BoundUpdate(program, update, params, optimizer, self.pool))

    def bind(self) -> None:
        """Take over parameters and state as they are now. Raises LayoutConflict; then nothing has changed."""
        for update in self._updates:
            update.check_uniform()
        self._check_own_memory()
        with torch.no_grad():
            for update in self._updates:
                update.bind_params()
                update.bind_states()

    def is_bound(self) -> bool:
        """False when the user has replaced a parameter's or a state's memory since the last step."""
        return all(update.is_bound() for update in self._updates)

    def _check_own_memory(self) -> None:
        """Parameters that the plan takes for tensors of their own may have been made to share memory since, or to be
        parts of a storage that others see."""
        if not self._updates:
            return
        shared = overlaps({**self.params, **self.buffers})
        updated = dict.fromkeys(name for update in self._updates for name in update.members())
        for name, others in shared.items():
            if name in updated and not self.program.params[name].shares:
                raise LayoutConflict("separate", f"{name} shares memory with {', '.join(others)} now")
        for update in self._updates:
            for name in update.moved():
                if is_part_of_storage(self.params[name]):
                    raise LayoutConflict("capture", f"{name} is part of a larger storage now, and has to stay there")

    def publish(self) -> bool:
        """After the first update: show the states in `optimizer.state`. Returns whether there was anything new."""
        new = [update.publish() for update in self._updates]
        return any(new)

    def tensors(self) -> list[torch.Tensor]:
        """What the updates write: parameters, and states as `optimizer.state` shows them."""
        return [tensor for update in self._updates for tensor in update.tensors()]

    def value(self, source: Source) -> Any:
        """The tensor, or list of tensors, for a flat or state input."""
        if source.kind == "flat":
            return self._updates[source.owner].flats[source.name]
        return self._updates[source.owner].lists[source.name]

    def numbers(self) -> list[dict[str, Any]]:
        """The hyper-parameters of each update, read from the optimizer now."""
        return [update.numbers() for update in self._updates]
