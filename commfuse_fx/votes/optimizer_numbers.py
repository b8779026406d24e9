"""The numbers of an optimizer that replicas of the parameters need alike: learning rates, weight decays, betas.

Why: docs/decisions.md, "A vote carries hashes of what ranks should have alike".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from commfuse_fx.runtime.ranks.ballots import hash62

ADVICE = (
    "Give all ranks the same numbers: a scheduler that follows the loss, such as ReduceLROnPlateau, needs the mean of "
    "the ranks' losses"
)

Key = tuple[int, str]
"""A param group, and the name of a number there."""


class OptimizerNumbers:
    """The numbers in the param groups of one rank. Those on a device other than the CPU are left out.

    optimizer: None where the caller updates. has_own: whether parameters that are marked layerwise_parallel are this
    rank's own, so that groups of them count for nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, has_own: bool) -> None:
        self._optimizer = optimizer
        self._has_own = has_own
        defaults = {} if optimizer is None else optimizer.defaults
        self._names = [name for name, value in defaults.items() if not isinstance(value, (bool, str))]
        self._values: list[Any] = []
        self._hash = 0
        self._known: dict[Key, None] = {}

    def hash(self) -> int:
        """A number for them that is another one on ranks which have others; 0 if there are none."""
        if self._optimizer is None:
            return 0
        values = [_number(group.get(name)) for _, group in self._groups() for name in self._names]
        if values != self._values or not self._hash:
            self._values, self._hash = values, hash62(repr(self.by_key()))
        return self._hash

    def by_key(self) -> dict[Key, Any]:
        """The numbers that count."""
        found = {(i, name): _number(group.get(name)) for i, group in self._groups() for name in self._names}
        return {key: value for key, value in found.items() if value is not None and key not in self._known}

    def leave_out(self, keys: Iterable[Key]) -> None:
        """These count no longer. All ranks call this together."""
        self._known.update(dict.fromkeys(keys))
        self._values, self._hash = [], 0

    def _groups(self) -> list[tuple[int, dict[str, Any]]]:
        assert self._optimizer is not None, "it has numbers"
        groups = enumerate(self._optimizer.param_groups)
        return [(i, group) for i, group in groups if not (self._has_own and _is_own(group))]


def differences(of_ranks: Sequence[Mapping[Key, Any]]) -> dict[Key, str]:
    """What differs between rank 0 and another rank, and how."""
    found = {}
    for number, name in dict.fromkeys(key for each in of_ranks for key in each):
        values = [each.get((number, name)) for each in of_ranks]
        other = next((rank for rank, value in enumerate(values) if repr(value) != repr(values[0])), 0)
        if other:
            text = f"{name} of param group {number} is {values[0]} on rank 0 and {values[other]} on rank {other}"
            found[number, name] = text
    return found


def _number(value: Any) -> Any:
    """The value as a number that compares and prints alike on all ranks; None for anything else."""
    kind = value.__class__
    if kind is float or value is None:
        return value
    if kind is tuple or kind is list:
        return [_number(each) for each in value]
    if kind is int:
        return float(value) if abs(value) < 1 << 53 else value
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and value.device.type == "cpu" else None
    return float(value) if isinstance(value, Real) and kind is not bool else None  # those of numpy, too


def _is_own(group: Mapping[str, Any]) -> bool:
    return all(getattr(param, "layerwise_parallel", False) for param in group["params"])
