"""The random numbers that a rank draws next: the generators of torch, of the CPU and of the model's devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from commfuse_fx.checkpoints.held import Held
from commfuse_fx.runtime.execute.random_states import RandomStates, default_generators


class RankGenerators:
    """The generators of one rank."""

    def __init__(self, model: nn.Module) -> None:
        self._by_type: dict[str, list[torch.Generator]] = {"cpu": [torch.default_generator]}
        for device in dict.fromkeys(param.device for param in model.parameters()):
            if device.type != "cpu":
                self._by_type.setdefault(device.type, []).extend(default_generators(device))

    def held(self) -> dict[str, list[Held]]:
        """Their states, by the type of the device."""
        return {
            kind: [Held.whole(each.get_state(), f"random/{kind}", is_own=True) for each in found]
            for kind, found in self._by_type.items()
        }

    def put(self, saved: Mapping[str, Any]) -> Callable[[], None]:
        """Give them states that were saved, those of the same type of device one after another.

        Returns what gives them back those that they have now. Raises RuntimeError for what is no state.
        """
        before = RandomStates([each for found in self._by_type.values() for each in found])
        try:
            for kind, found in self._by_type.items():
                for generator, state in zip(found, saved.get(kind, ()), strict=False):
                    generator.set_state(state)
        except BaseException:
            before.restore()
            raise
        return before.restore
