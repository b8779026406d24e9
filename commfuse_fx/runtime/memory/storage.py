"""Storage of the parameters and the optimizer states of a compiled step.

Parameters that are updated together become parts of one flat tensor, and so do their optimizer states. Each part has
a storage of its own that covers only its bytes of the flat tensor, so a file or a copy of it holds nothing else.
For the user nothing changes: `param`, `optimizer.state[param]` and both state_dicts look as before, and the next step
uses the values that the user loads or assigns.

Why: docs/decisions.md, "Parameters of a bucket move into flat storage".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from commfuse_fx.ir.core.program import Program, Source
from commfuse_fx.ir.ops.shared_memory import is_part_of_storage, overlaps
from commfuse_fx.ir.updates.update_layout import LayoutConflict
from commfuse_fx.runtime.memory.bound_update import BoundUpdate
from commfuse_fx.runtime.memory.flat_pool import FlatPool
from commfuse_fx.runtime.memory.scalar_states import Optimizer


class Storage:
    """Storage binds the inputs of one program that come from parameters and optimizer states.

    params: what is updated, by name. optimizer: holds its states.
    """

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
        self.optimizer = optimizer
        self.buffers = buffers or {}
        self.pool = FlatPool() if pool is None else pool
        self._updates: list[BoundUpdate] = []
        for update in program.updates:
            assert optimizer is not None, "a program that updates has the optimizer's state as its input"
            self._updates.append(BoundUpdate(program, update, params, optimizer, self.pool))

    def bind(self) -> None:
        """Bind to the present parameters and states.

        Raises LayoutConflict if the program's layout does not fit them. Then nothing has changed.
        """
        for update in self._updates:
            update.check_uniform()
        self._check_own_memory()
        with torch.no_grad():
            for update in self._updates:
                update.bind_params()
                update.bind_states()

    def is_bound(self) -> bool:
        """Whether parameters and states still lie where `bind` has put them."""
        return all(update.is_bound() for update in self._updates)

    def _check_own_memory(self) -> None:
        """Raises LayoutConflict if an updated parameter shares its memory by now, unlike when the plan was made."""
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
        """After an update, put new states into `optimizer.state`. Returns whether there were any."""
        new = [update.publish() for update in self._updates]
        return any(new)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that the updates write: parameters, and states as `optimizer.state` has them."""
        return [tensor for update in self._updates for tensor in update.tensors()]

    def value(self, source: Source) -> Any:
        """The tensor, or list of tensors, for a flat or state input."""
        if source.kind == "flat":
            return self._updates[source.owner].flats[source.name]
        return self._updates[source.owner].lists[source.name]

    def numbers(self) -> list[dict[str, Any]]:
        """The hyper-parameters of each update, read from the optimizer now."""
        return [update.numbers() for update in self._updates]
