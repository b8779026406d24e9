"""What `parallel_optimizer_config` says: which parameters are updated in parts, on which ranks, and how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from commfuse_fx.errors import ConfigKeyError, ConfigTypeError, ConfigValueError
from commfuse_fx.support.checks import alternatives, check_bool, check_choice, check_int, is_int, show

SCATTER, BROADCAST = "reduce_scatter", "broadcast"
"""The modes: rows of each parameter are updated on each rank, or whole parameters on one rank each."""

LEVELS = STATES, GRADIENTS, PARAMETERS = (1, 2, 3)
"""The levels from which on the optimizer's state, gradients, and parameters are divided."""


@dataclass(frozen=True, kw_only=True)
class ParallelOptimizer:
    """The options of the parallel optimizer, each under its name in the dictionary.

    parallel_optimizer_threshold: KiB that a parameter must have at least to be updated in parts.
    optimizer_weight_shard_size: neighbouring ranks among which it is divided, one part of the group beside the other;
        -1: all of the group.
    gradient_accumulation_shard: whether micro-batches leave sums of the rows that a rank updates, in place of sums of
        whole gradients.
    pad: whether parameters whose first dimension does not divide by the ranks are divided, the last rows padded.
    mode: "reduce_scatter" or "broadcast".
    level: what is divided between steps. 1: the optimizer's state; 2: gradients as well; 3: parameters as well.
    """

    parallel_optimizer_threshold: int = 64
    optimizer_weight_shard_size: int = -1
    gradient_accumulation_shard: bool = False
    pad: bool = False
    mode: str = SCATTER
    level: int = 1

    @classmethod
    def parse(cls, given: object, where: str = "parallel_optimizer_config") -> ParallelOptimizer:
        """The options in a dictionary, or all defaults for None.

        Raises ConfigTypeError, ConfigValueError or ConfigKeyError, which name the key, the value and the fix.
        """
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise ConfigTypeError(f"{where} is {show(given)}; give a dict of options or None")
        known = [field.name for field in fields(cls)]
        for key in given:
            if not isinstance(key, str):
                raise ConfigTypeError(f"{where} is {show(given)}; every key must be a str, not {show(key)}")
            if key not in known:
                raise ConfigKeyError(f"{where} has the key {show(key)}, which is unknown{alternatives(key, known)}")
        found = cls(**{key: _CHECKS[key](value, f'{where}["{key}"]') for key, value in given.items()})
        found._check_mode(where)
        return found

    def _check_mode(self, where: str) -> None:
        """One rank owns all of a parameter, so options of rows do not go with that."""
        if self.mode != BROADCAST:
            return
        for key, fine in (("level", (1, 2)), ("optimizer_weight_shard_size", (-1,))):
            if getattr(self, key) not in fine:
                raise ConfigValueError(
                    f'{where}["{key}"] is {getattr(self, key)}, which divides the rows of parameters, but with '
                    f'mode="{BROADCAST}" each has one owner; leave {key} out, or use mode="{SCATTER}"'
                )

    @property
    def sharing(self) -> int:
        """How many neighbouring ranks share an update; 0: all of the group."""
        return max(self.optimizer_weight_shard_size, 0)

    def __str__(self) -> str:
        """The options that differ from their defaults, as in "level=2, pad=True"; "" where none does."""
        changed = [field for field in fields(self) if getattr(self, field.name) != field.default]
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in changed)

    @staticmethod
    def dict_of(text: str) -> dict[str, Any]:
        """The dictionary of options that `str` has written. Raises ValueError for another text."""
        found: dict[str, Any] = {}
        for option in text.split(", "):
            key, equals, value = option.partition("=")
            if not equals or key in found:
                raise ValueError(f"{option[:40]!r} is no option such as level=2")
            found[key] = _BOOLS[value] if value in _BOOLS else int(value) if _INT.fullmatch(value) else value
        return found


_BOOLS = {"True": True, "False": False}
_INT = re.compile(r"-?\d{1,9}")


def _check_threshold(value: object, where: str) -> int:
    return check_int(value, where, 0, limit=", in KiB")


def _check_shard_size(value: object, where: str) -> int:
    if is_int(value) and (value == -1 or value >= 1):
        return value
    error = ConfigValueError if is_int(value) else ConfigTypeError
    raise error(
        f"{where} is {show(value)}; give an int >= 1 that divides the ranks of the group, or -1 for all of them"
    )


def _check_level(value: object, where: str) -> int:
    return check_int(value, where, LEVELS[0], LEVELS[-1])


def _check_mode(value: object, where: str) -> str:
    return check_choice(value, where, (SCATTER, BROADCAST))


_CHECKS: Mapping[str, Any] = {
    "parallel_optimizer_threshold": _check_threshold,
    "optimizer_weight_shard_size": _check_shard_size,
    "gradient_accumulation_shard": check_bool,
    "pad": check_bool,
    "mode": _check_mode,
    "level": _check_level,
}
