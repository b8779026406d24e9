"""A state that somebody hands over as a dict: its tensors can be read whole or in part, as those of files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from commfuse_fx.checkpoints.held import Stored
from commfuse_fx.checkpoints.plain_values import replaced
from commfuse_fx.runtime.memory.guard import finish_others
from commfuse_fx.runtime.memory.places import Place


class StateInMemory:
    """A state in memory. values: the same with `Stored` in place of tensors."""

    def __init__(self, state: Any) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self.values: Any = replaced(state, self._stored)
        finish_others(self._tensors.values())

    def _stored(self, _: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        name = str(len(self._tensors))
        self._tensors[name] = value
        return Stored(name, tuple(value.shape))

    def read(self, places: Mapping[str, Place]) -> dict[str, torch.Tensor]:
        """Copies of tensors, by their names: of what lies at these places, and of the others all."""
        found = {}
        for name, tensor in self._tensors.items():
            place = places.get(name) or Place.of_whole(tensor.shape)
            found[name] = torch.zeros(place.part, dtype=tensor.dtype, device=tensor.device)
            for box, view in place.boxes_of(found[name]):
                view.copy_(tensor.detach()[box.slices])
        return found
