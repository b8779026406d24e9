"""States of optimizers that are one number per parameter: step counts, and what else a rule keeps of the kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from commfuse_fx.errors import ConfigValueError
from commfuse_fx.ir.core.program import Segment
from commfuse_fx.ir.updates.update_layout import LayoutConflict
from commfuse_fx.kernels.update_rules import Rule
from commfuse_fx.runtime.memory.flat_pool import FlatPool
from commfuse_fx.runtime.memory.own_storage import with_own_storage


class States(Protocol):
    """Optimizer states by parameter. Indexing with a parameter that has no state makes an empty one, as torch does."""

    def __getitem__(self, param: Any, /) -> Any: ...

    def get(self, param: Any, /) -> Any: ...


class Optimizer(Protocol):
    """The attributes of an optimizer that storage uses."""

    @property
    def state(self) -> States: ...

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class ScalarStates:
    """The scalar states of an update. Those of a segment lie in one tensor per kind, of which every parameter has its
    own number, so that eager steps can go on from here.

    group: the number of the param group.
    """

    def __init__(
        self, rule: Rule, params: Mapping[str, nn.Parameter], optimizer: Optimizer, group: int, pool: FlatPool
    ) -> None:
        self.rule = rule
        self.params = params
        self.optimizer = optimizer
        self.group = group
        self.pool = pool

    def check_uniform(self, segment: Segment) -> None:
        """Parameters that are updated as one tensor need the same numbers."""
        for state in self.rule.scalars if segment.is_flat else ():
            values = [self._number(name, state) for name, _ in segment.members]
            if any(value != values[0] for value in values):
                what = "step counts" if state == "step" else f"values of {state}"
                raise LayoutConflict("separate", f"parameters of one bucket have different {what}")

    def bind(self, segment: Segment, state: str) -> tuple[torch.Tensor, list[Any]]:
        """The numbers of a segment's parameters: in one tensor, and as tensors that lie there."""
        names = [name for name, _ in segment.members]
        held = [self._held(name, state) for name in names]
        by_index = Segment(tuple((name, i) for i, name in enumerate(names)), len(names))
        numbers = self.pool.find(state, by_index, [each if isinstance(each, torch.Tensor) else None for each in held])
        if numbers is None:
            values = [self._number(name, state) for name in names]
            numbers = torch.tensor(values, dtype=_dtype(state, held[0]), device=self.params[names[0]].device)
            held = [with_own_storage(number) for number in numbers.unbind()]
            self.pool.add(state, by_index, numbers)
        return numbers, held

    def _held(self, name: str, state: str) -> Any:
        held = self.optimizer.state.get(self.params[name])
        return None if held is None else held.get(state)

    def _number(self, name: str, state: str) -> float:
        held = self._held(name, state)
        if held is None:
            return self.rule.value_at_first(state, self.optimizer.param_groups[self.group])
        if isinstance(held, torch.Tensor) and held.numel() != 1:
            raise ConfigValueError(
                f"the optimizer's {state} of {name} has the shape {tuple(held.shape)}, and has to be one number: clear "
                "optimizer.state[parameter], or give it such a state"
            )
        return float(held)


def _dtype(state: str, held: Any) -> torch.dtype:
    """That of torch.optim, but for step counts, which fused kernels take as float32. A loaded state keeps its own."""
    if state == "step":
        return torch.float32
    if isinstance(held, torch.Tensor):
        return held.dtype
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
