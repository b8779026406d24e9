"""What makes a saved state that of another model or of another optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from commfuse_fx.checkpoints.held import Stored
from commfuse_fx.errors import CheckpointError
from commfuse_fx.support.checks import is_int, show
from commfuse_fx.support.long_lists import shortened

MOST = 5
"""So many names of each kind are listed."""


class StateDifferences:
    """The differences between a saved state and that of a step."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def check(self) -> None:
        """Raises CheckpointError if there are any, which lists them."""
        if self._lines:
            listed = "\n  ".join(self._lines)
            raise CheckpointError(
                f"this is the state of another model or optimizer, and nothing is loaded:\n  {listed}\nBuild model and "
                "optimizer as they were when it was saved, or take out of the checkpoint what fits: see "
                "docs/checkpoints.md"
            )

    def sections(self, saved: object, wanted: Iterable[str]) -> None:
        """Raises CheckpointError for what is no state of a step, or lacks a part that this step has."""
        names = tuple(wanted)
        if not isinstance(saved, Mapping) or any(not isinstance(saved.get(name), Mapping) for name in names):
            found = ", ".join(map(str, saved)) if isinstance(saved, Mapping) else show(saved)
            raise CheckpointError(
                f"the state of this step is a dict of the dicts {', '.join(names)}, and this is {found or 'empty'}: "
                "give what step.state_dict() has returned for such a step"
            )
        unknown = [name for name in saved if name not in names]
        if unknown:
            raise CheckpointError(
                f"the state has {', '.join(map(str, unknown))}, and this step has none: compile it with an optimizer, "
                "as the step that was saved, or take that out of the dict"
            )
        step = saved["step"]
        seed = step.get("seed")
        if not is_int(step.get("count")) or not (seed is None or is_int(seed)):
            raise CheckpointError(
                f'the state\'s "step" is {show(step)}; give {{"count": an int, "seed": an int or None}}'
            )

    def names(self, kind: str, saved: Iterable[Any], here: Iterable[str]) -> None:
        """Names that only one of them has."""
        there, mine = dict.fromkeys(saved), dict.fromkeys(here)
        self._list(f"{kind} missing in the checkpoint: {{}}", [name for name in mine if name not in there])
        self._list(f"{kind} that the model does not have: {{}}", [str(name) for name in there if name not in mine])

    def shapes(self, saved: Mapping[str, Any], here: Mapping[str, torch.Tensor]) -> None:
        """Tensors of other shapes."""
        found = []
        for name, tensor in here.items():
            if name in saved:
                stored = saved[name]
                shape = list(stored.shape) if isinstance(stored, Stored) else f"no tensor but {show(stored)}"
                if shape != list(tensor.shape):
                    found.append(f"{name} is {shape} in the checkpoint, and {list(tensor.shape)} here")
        self._list("{}", found)

    def groups(self, saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        """Param groups of an optimizer, its hyper-parameters, and parameters that have states."""
        groups, states = saved.get("param_groups"), saved.get("state")
        are_dicts = isinstance(groups, (list, tuple)) and all(isinstance(group, Mapping) for group in groups)
        if not isinstance(groups, (list, tuple)) or not are_dicts or not isinstance(states, Mapping):
            self._lines.append('the optimizer\'s state has no list of dicts "param_groups", or no dict "state"')
            return
        here = optimizer.param_groups
        if len(groups) != len(here):
            self._lines.append(f"the optimizer has {len(groups)} param groups in the checkpoint, and {len(here)} here")
            return
        for number, (there, mine) in enumerate(zip(groups, here, strict=True)):
            kind = f"parameter of the optimizer's group {number}"
            named = there.get("params", ())
            if not isinstance(named, (list, tuple)) or any(not isinstance(name, str) for name in named):
                self._lines.append(f"the optimizer's group {number} lists no names of parameters: {show(named)}")
                continue
            self._list(
                f"the optimizer's group {number} has {{}}",
                [
                    f"{key}={show(there[key])} in the checkpoint, and {show(mine[key])} here"
                    for key in optimizer.defaults
                    if key in there and key in mine and not _is_alike(there[key], mine[key])
                ],
            )
            self.names(kind, named, [names[id(param)] for param in mine["params"]])
            missing = [key for key in optimizer.defaults if key not in there]
            other = [key for key in there if key not in mine and key not in ("initial_lr", "param_names")]
            if missing and other:  # either alone comes from schedulers and versions of PyTorch
                self._lines.append(
                    f"the optimizer's group {number} has {', '.join(map(str, other))} in the checkpoint, and "
                    f"{', '.join(missing)} here: it is another optimizer than {type(optimizer).__name__}"
                )
        bad = [name for name, state in states.items() if not isinstance(state, Mapping)]
        if type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS):
            bad += [
                name
                for name in states
                if name not in bad and not all(_is_state(*each) for each in states[name].items())
            ]
        self._list("the state of {} is none of an optimizer", bad)
        known = {names[id(param)] for group in here for param in group["params"]}
        self._list("state of a parameter that the optimizer does not have: {}", [n for n in states if n not in known])

    def _list(self, text: str, found: list[Any]) -> None:
        if found:
            self._lines.append(text.format(", ".join(shortened(list(map(str, found)), MOST, "and {} more"))))


def _is_alike(saved: Any, here: Any, may_lack: bool = False) -> bool:
    """Whether a hyper-parameter may be one in place of another: a number for a number, a tuple for a tuple.

    may_lack: whether it may be None in place of a number.
    """
    if here is None:
        return saved is None or isinstance(saved, (bool, int, float, str, Stored))
    if isinstance(here, bool):
        return saved is None or isinstance(saved, bool)
    if isinstance(here, (int, float, torch.Tensor)):
        is_number = isinstance(saved, (int, float)) and not isinstance(saved, bool)
        return is_number or isinstance(saved, Stored) or (may_lack and saved is None)
    if isinstance(here, (tuple, list)):
        are_lists = isinstance(saved, (tuple, list)) and len(saved) == len(here)
        return are_lists and all(_is_alike(each, mine, True) for each, mine in zip(saved, here, strict=True))
    return not isinstance(here, str) or saved is None or isinstance(saved, str)


def _is_state(name: object, value: object) -> bool:
    """Whether an optimizer of torch may hold this under the name: a tensor, and for few names a number."""
    return value is None or isinstance(value, Stored) or (name in _NUMBERS and isinstance(value, (int, float)))


_NUMBERS = ("step", "eta", "mu", "mu_product")
